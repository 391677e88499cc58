"""llama.cpp's /infill, by which editors complete code, as a translation onto text completions.

Imports `engine.server`'s text path.
"""

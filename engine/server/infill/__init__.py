"""llama.cpp's /infill, by which editors complete code, as a translation onto text completions.

The folder imports `engine.server`'s text path.
"""

"""GGUF files: read as they are, described once in a directory of the cache, their blocks given to the kernels.

Imports `engine.weights` and what that imports.
"""

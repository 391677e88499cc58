"""GGUF files: read as they are, described once in a directory of the cache, their blocks given to the kernels.

The folder imports `engine.weights` and what that imports.
"""

"""GGUF files: read as they are, described once by a directory in the cache, their blocks given to the kernels.

Imports `engine.weights`, `engine.core` and `engine.files`.
"""

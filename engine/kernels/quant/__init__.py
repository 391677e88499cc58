"""Matrices in the blocks of a GGUF file: read from it, packed into tiles, and multiplied as they are.

Imports `engine.core` and `engine.kernels`.
"""

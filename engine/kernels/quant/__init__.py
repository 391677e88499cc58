"""Matrices in the blocks of a GGUF file: read from it, packed into tiles with its own bits, and looked up or unpacked.

The folder imports `engine.core` and `engine.kernels`.
"""

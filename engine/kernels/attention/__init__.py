"""Attention in which a row's bits depend on its own visible keys alone, for each instruction set.

The folder imports `engine.core` and `engine.kernels`.
"""

"""Numba and LLVM only: vectors, threads, the steps of a layer, layouts of matrices.

The folder imports `engine.core` and knows nothing of models.
"""

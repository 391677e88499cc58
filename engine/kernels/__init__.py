"""Numba and LLVM only: vectors, threads, the steps of a layer, layouts of matrices.

Imports `engine.core`. Knows nothing of models.
"""

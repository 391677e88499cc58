"""Indexes of what was read or said: datastores, passages, and each request's own text.

The folder imports `engine.core`, `engine.files`, `engine.text`, and numba's helpers of `engine.kernels`.
"""

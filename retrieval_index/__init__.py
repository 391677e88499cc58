"""What was read or said, indexed: datastores, passages, and each request's own text.

Imports `engine.core`, `engine.files`, `engine.text`, and numba's helpers of `engine.kernels`.
"""

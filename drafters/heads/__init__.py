"""Draft heads: one file each, on common sessions, layers and checkpoints.

The folder imports `engine.core`, `engine.kernels` and `engine.model`'s interfaces.
"""

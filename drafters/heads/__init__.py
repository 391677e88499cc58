"""Draft heads: one file each, on common sessions, layers and checkpoints.

Imports `engine.core`, `engine.kernels` and `engine.model`'s interfaces.
"""

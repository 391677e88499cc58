"""The target: how its weights run, and the proof that this equals the stock forward.

Imports `engine.core`, `engine.kernels` and `engine.weights`.
"""

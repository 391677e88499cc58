"""The target: how its weights run, and the proof that this equals the stock forward.

The folder imports `engine.core`, `engine.kernels` and `engine.weights`.
"""

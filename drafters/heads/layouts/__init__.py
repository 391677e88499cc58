"""Layouts of draft heads other than the public ones, read as these: names, conventions, configurations.

The folder imports `engine.weights` and `engine.kernels.quant`.
"""

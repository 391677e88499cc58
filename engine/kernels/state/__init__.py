"""Layers with a state, such as recurrent ones and short convolutions: a row depends on its ancestors alone.

Imports `engine.kernels`, `engine.core` and what these import. `walk` is what all kinds share; each kind is a file.
"""

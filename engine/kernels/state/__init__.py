"""Layers with a state, such as recurrent ones and short convolutions: a row depends on its ancestors alone.

The folder imports `engine.kernels`, `engine.core` and what these import. All kinds share `walk`; each kind is a file.
"""

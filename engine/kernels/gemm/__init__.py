"""Matrix products that give a row the same bits whatever rows are beside it.

Imports `engine.core` and `engine.kernels`.
"""

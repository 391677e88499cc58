"""Matrix products that give a row the same bits whatever rows are beside it.

The folder imports `engine.core` and `engine.kernels`.
"""

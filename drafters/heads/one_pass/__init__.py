"""The block head: one forward gives the candidates of all depths.

The folder imports `drafters.heads` and what lies below it.
"""

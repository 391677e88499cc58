"""The block head: one forward gives the candidates of all depths.

Imports `drafters.heads` and what lies below it.
"""

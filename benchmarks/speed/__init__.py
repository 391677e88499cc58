"""What one part costs: the forward and its parts, indexes, drafting, pauses.

Imports `benchmarks.report`.
"""

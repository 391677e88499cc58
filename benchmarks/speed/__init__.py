"""What one part costs: a forward, its parts, and what the machine would allow.

Imports `benchmarks.report`.
"""

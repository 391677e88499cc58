"""Measurements of engines: speed, load, quality, exactness.

The folder imports `benchmarks.inputs` and `benchmarks.report`.
"""

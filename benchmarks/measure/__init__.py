"""Measurements of engines: speed, load, quality, exactness.

Imports `benchmarks.inputs` and `benchmarks.report`.
"""

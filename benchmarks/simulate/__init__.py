"""Drafters replayed over known answers, without an engine: acceptance, growth, shapes.

Imports `benchmarks.inputs` and `benchmarks.report`.
"""

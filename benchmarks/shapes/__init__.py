"""Measures shapes of published models with random weights: `python -m benchmarks.shapes`."""

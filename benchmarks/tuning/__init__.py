"""`talon tune`: the model answers prompts, a head is trained on the answers, measured, and installed if it pays.

The folder imports `benchmarks.measure` and `benchmarks.report`, and trains with `drafters.training`.
"""

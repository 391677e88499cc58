"""A head and retrieval in one tree: the merge, and the calibration that makes confidences comparable.

Imports `drafters.heads` and `engine.core`.
"""

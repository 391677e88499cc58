"""A head and retrieval in one tree: the merge, and the calibration that makes confidences comparable.

The folder imports `drafters.heads` and `engine.core`.
"""

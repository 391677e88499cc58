"""Drafters without a model: they look the next tokens up in what was read or said.

The folder imports `engine.core`, `retrieval_index` and `drafters.parts`.
"""

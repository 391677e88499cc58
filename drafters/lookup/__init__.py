"""Drafters without a model: they look the next tokens up in what was read or said.

Imports `engine.core`, `retrieval_index` and `drafters.requirements`.
"""

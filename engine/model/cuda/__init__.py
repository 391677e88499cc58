"""The target on a GPU: Triton attention, fixed row counts, captured graphs.

The folder imports `engine.core` and `engine.model`.
"""

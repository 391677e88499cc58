"""The target on a GPU: Triton attention, fixed row counts, captured graphs.

Imports `engine.core` and `engine.model`.
"""

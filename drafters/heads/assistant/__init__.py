"""Gemma 4's assistant: a draft head that reads the target's own keys and values.

The folder imports what `drafters.heads` imports.
"""

"""A model is tried when it is loaded: against the stock forward, and a token's bits alone against those in a batch.

The folder imports `engine.model` and what that imports.
"""

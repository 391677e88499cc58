"""`talon train`: heads and small models, trained on a target's own answers.

The folder imports `drafters.heads` and the engine up to `engine.files` and `engine.model`.
"""

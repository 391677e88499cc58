"""`talon train`: heads and small models, trained on a target's own answers.

Imports `drafters.heads` and the engine up to `engine.files` and `engine.model`.
"""

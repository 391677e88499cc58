"""The verifier's worker: the round, what is in it, and what it costs.

The folder imports `engine.model`, `engine.sampling`, `engine.wire` and what lies below them; no drafter.
"""

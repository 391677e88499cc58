"""The drafter's worker: which trees to make next, for which outcomes.

The folder imports `engine.wire` and `engine.core`; the drafter itself is handed in.
"""

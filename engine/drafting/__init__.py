"""The drafter's worker: which trees to make next, for which outcomes.

Imports `engine.wire` and `engine.core`; the drafter itself is handed in.
"""

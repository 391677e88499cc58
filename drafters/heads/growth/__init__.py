"""How a head's tree grows: policies, the order of candidates, many trees in step.

Imports `engine.core` and `engine.sampling`; policies know no head.
"""

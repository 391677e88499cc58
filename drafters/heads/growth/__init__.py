"""How a head's tree grows: policies, the order of candidates, many trees in step.

The folder imports `engine.core` and `engine.sampling`; policies know no head.
"""

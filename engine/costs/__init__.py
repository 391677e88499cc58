"""What prices a draft: the time of a forward, what a second is worth, and what each kind of draft has gained.

Imports `engine.core` and `engine.wire`: the verifier decides with it, and drafters count their gains in the same terms.
"""

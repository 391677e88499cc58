"""The price of a draft: the time of a forward, the worth of a second, and what each kind of draft has gained.

The folder imports `engine.core` and `engine.wire`. The verifier decides by these prices, and drafters count their gains
in the same terms.
"""

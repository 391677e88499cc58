"""From logits to tokens: penalties, grammars, noise, the draw, and the walk down a tree.

The folder imports `engine.core`, `engine.wire` (log-probabilities are a message) and `engine.kernels.jit_cache`.
"""

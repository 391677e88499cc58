"""One decoder layer as steps of a program: which steps there are, what they read and write, and their few own kernels.

The folder imports products, attention and the fused kernels; the lean decoder and the draft heads import it.
"""

"""One decoder layer as steps of a program: which steps there are, what they read and write, and their few own kernels.

`program` has the kernels' steps one by one, and `decoder_steps` makes layers of them. The folder imports products and
attention; the lean decoder and the draft heads import it.
"""

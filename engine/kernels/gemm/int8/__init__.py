"""Products of matrices in blocks with rows rounded to 8 bits: `matmul` is how others use them, `layout` how both lie in
memory, `rows` rounds, `dots` has the instructions, `sums` puts them together. The folder imports what
`engine.kernels.gemm` does.
"""

"""Talon's tests. Where TALON_MODELLED_FEATURES has a processor's features, as LLVM names them, they run its kernels."""

from benchmarks.kernels.modelled import install_if_told

install_if_told()  # before anything imports kernels

"""From a name to tensors: the catalogue, downloads, the hub, GGUF files.

Imports `engine.core`, `engine.kernels` and `engine.config`.
"""

"""From a name to tensors: the catalogue, downloads, the hub, GGUF files, checkpoints that are quantised.

Imports `engine.core`, `engine.kernels` and `engine.config`.
"""

"""From a name to tensors: the catalogue, downloads, the hub, GGUF files, checkpoints that are quantised.

The folder imports `engine.core`, `engine.kernels` and `engine.config`.
"""

"""The draft head that comes in a model's own file: `nextn` of GGUF, `mtp` of safetensors.

The folder imports what `drafters.heads` imports.
"""

"""The draft head that comes in a model's own file: `nextn` of GGUF, `mtp` of safetensors.

Imports what `drafters.heads` imports.
"""

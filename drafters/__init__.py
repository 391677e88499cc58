"""Everything that proposes tokens. A method is a file in one of the folders and a line in `engine.core.methods`.

The folder imports `engine.core`, `engine.kernels`, `engine.model` and `retrieval_index`. The engine knows the registry
alone.
"""

"""How workers talk: the messages, the sockets that carry them, their keys, and the trace of what was done.

The folder imports `engine.core`.
"""

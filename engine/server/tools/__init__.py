"""Tools that an answer may call: how clients ask for them, and what the engine gets of it.

The folder imports `engine.server.body` and `engine.text`.
"""

"""Tools that an answer may call: how clients ask for them, and what of it the engine gets.

Imports `engine.server.body` and `engine.text`.
"""

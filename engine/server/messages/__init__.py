"""Anthropic's /v1/messages, as a translation onto the chat path.

Imports `engine.server`'s chat path and `engine.server.tools`.
"""

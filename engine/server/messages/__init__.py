"""Anthropic's /v1/messages, as a translation onto the chat path.

The folder imports `engine.server`'s chat path and `engine.server.tools`.
"""

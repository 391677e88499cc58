"""OpenAI's /v1/responses, as a translation onto the chat path.

Imports `engine.server`'s chat path and `engine.server.tools`.
"""

"""OpenAI's /v1/responses, as a translation onto the chat path.

The folder imports `engine.server`'s chat path and `engine.server.tools`.
"""

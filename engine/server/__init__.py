"""`talon serve`: OpenAI's HTTP API in front of an engine, in the engine's own event loop (extra `serve`)."""

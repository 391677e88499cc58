"""The user's process: it starts workers, watches them, and keeps every request until it is answered.

The folder imports all of the engine below it; `engine.api`, the server and the command are above.
"""

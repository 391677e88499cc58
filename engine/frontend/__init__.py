"""The user's process: starts workers, watches them, and keeps every request until it is answered.

Imports all of the engine below it; `engine.api`, the server and the command are above.
"""

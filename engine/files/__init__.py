"""Files that users give and get: lines of JSON, prompts, answers; a file is written whole or not at all.

Imports `engine.core`.
"""

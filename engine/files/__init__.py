"""Files that users give and get: lines of JSON, prompts, answers; a file is written whole or not at all. And a folder
of files that processes share as a cache.

Imports `engine.core`.
"""

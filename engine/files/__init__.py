"""Files that users give and get: lines of JSON, prompts, answers, each written whole or not at all; and a folder of
files that processes share as a cache.

The folder imports `engine.core`.
"""

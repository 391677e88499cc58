"""The `talon` command and its options. Each command loads what it needs when it runs.

Imports everything; nothing imports it.
"""

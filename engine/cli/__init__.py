"""The `talon` command and its options. Each command loads what it needs when it runs.

The folder imports everything; nothing imports it.
"""

"""How prompts are read: how far a long one is, what a client may know of it, and text that spoils the prefix cache.

`answers.py` imports its timings, and the folder imports the objects in `answers.py`.
"""

"""What a server learns while nobody asks: a lesson trains an owner's head on its texts, in a process of its own, and
installs it where it drafts better than the one so far.
"""

"""Tokens to text and back: chat messages, pieces of answers, stop texts.

The folder imports `engine.core`; the tokenizer is handed in.
"""

"""Tokens to text and back: chat messages, pieces of answers, stop texts.

Imports `engine.core`; the tokenizer is handed in.
"""

"""What is asked: questions, passages, schemas, and the scores of answers.

Imports the engine alone.
"""

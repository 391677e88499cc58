"""What is asked: questions, passages, schemas, and the scores of answers.

The folder imports the engine alone.
"""

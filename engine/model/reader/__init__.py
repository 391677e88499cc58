"""Reads the structure of a stock model from its modules, and what a module computes by trying it: never from a family's
name. What is read so is proved by comparing logits (`engine.model.trial.forward_choice`).
"""

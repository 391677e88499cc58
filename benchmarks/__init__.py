"""Measurements: `talon bench`, `check`, `profile`, ... Imports here are relative, because a wheel has
engine.benchmarks.
"""

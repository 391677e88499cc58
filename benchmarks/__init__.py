"""Measurements: `talon bench`, `check`, `profile`, ... Imports here are relative: a wheel has engine.benchmarks."""

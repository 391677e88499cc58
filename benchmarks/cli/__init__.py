"""The measuring commands of `talon` and their options.

Imports all of `benchmarks`; imports here are relative: a wheel has engine.benchmarks.
"""

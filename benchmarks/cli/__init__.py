"""The measuring commands of `talon` and their options.

The folder imports all of `benchmarks`; imports here are relative, because a wheel has engine.benchmarks.
"""

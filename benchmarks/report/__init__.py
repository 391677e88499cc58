"""Rows to pages: records, statistics, tables and plots.

Imports no measurement.
"""

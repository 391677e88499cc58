"""Rows to pages: records, statistics, tables and plots.

The folder imports no measurement.
"""

"""Explain the decisions of a compilation, and capture its reports."""

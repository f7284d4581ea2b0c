"""Kernel selection: records, cost models and libraries."""

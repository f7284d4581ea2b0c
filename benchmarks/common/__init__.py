"""Modules that benchmarks import, and programs that they start."""

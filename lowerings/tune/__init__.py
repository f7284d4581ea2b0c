"""Measure candidates, compiled beside one another."""

"""Measurement of candidates, which are compiled in parallel."""

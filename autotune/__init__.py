"""Measured kernel choice: problem, verification, timing, records; no op has two choices yet."""

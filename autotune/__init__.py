"""Measured kernel choice: problems, choices and records of them as data, merged and compared."""

"""Measured kernel choice: candidates are verified and raced; records are merged and compared."""

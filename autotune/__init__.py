"""Measured kernel choice: candidates judged and raced, records as data, merged and compared."""

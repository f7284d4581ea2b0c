"""Autotune records, tables and tuners for tests."""

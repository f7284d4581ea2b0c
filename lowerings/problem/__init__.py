"""Describe a problem of a kernel: shapes, settings, and the parameters to choose from."""

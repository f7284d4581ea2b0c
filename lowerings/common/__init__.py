"""Calls of kernels and templates, shared by all families."""

"""Lowerings of ops on 8-bit integers."""

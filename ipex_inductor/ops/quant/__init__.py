"""Ops on 8-bit integers."""

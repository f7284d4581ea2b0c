"""Lowerings of attention."""

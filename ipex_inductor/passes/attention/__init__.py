"""Rewrite attention, so that one kernel computes it."""

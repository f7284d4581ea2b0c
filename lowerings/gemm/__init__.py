"""Lowerings of GEMMs."""

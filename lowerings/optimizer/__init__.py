"""Lowerings of fused optimizer steps."""

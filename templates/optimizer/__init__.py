"""Kernels of fused optimizer steps."""

"""Compile kernels, and load them."""

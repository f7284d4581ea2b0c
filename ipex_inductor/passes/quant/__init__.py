"""Passes on graphs with quantized values."""

"""Lowerings of convolutions and pools."""

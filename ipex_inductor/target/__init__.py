"""Describe the devices that kernels are compiled for."""

"""Compilers of kernels, and loaders of the compiled code."""

"""Shapes and problems that kernels are tested with, on a CPU and on a GPU."""

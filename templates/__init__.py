"""Kernels as templates in C++ and Triton, compiled or from the kernel cache, and their launch."""

"""Kernels in SYCL: compiled in a child, kept in the kernel cache, run on Intel GPUs and CPUs."""

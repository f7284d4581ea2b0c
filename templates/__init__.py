"""Kernel templates (Triton, C++, SYCL), each beside its reference; none is needed yet."""

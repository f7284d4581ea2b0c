"""Group parameters by kernel, and launch the kernels."""

"""Write calls of kernels and templates, for every family."""

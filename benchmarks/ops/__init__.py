"""Single kernels on one GPU, beside the libraries'."""

"""Name the devices that kernels are compiled for."""

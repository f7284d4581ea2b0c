"""SYCL kernels for Intel GPUs and CPUs, compiled in a child process and cached."""

"""Names of Intel Extension for PyTorch."""

"""Read tensors' addresses, versions and contents outside of Python."""

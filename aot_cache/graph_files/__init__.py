"""Keep compiled graphs as entries of the kernel cache."""

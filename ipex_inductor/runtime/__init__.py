"""Settings of the process that computes: threads, memory and garbage collection."""

"""Process state at run time: threads, memory and garbage collection."""

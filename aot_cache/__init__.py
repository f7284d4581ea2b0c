"""What outlives a process: where our files live, what a key is made of, the kernel cache.

Everything read back from a disk is judged here before anything else may use it.
"""

"""Kernel cache and everything else that outlives a process: cache folder, keys, bundles.

Everything read back from a disk is verified here before any other package uses it.
"""

"""A folder for PYTHONPATH: what a program started by `as_ipex` starts finds IPEX here.

The two modules make way for those of `compat_ipex`, which are what the program gets.
"""

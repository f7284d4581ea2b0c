"""A folder for PYTHONPATH: child processes of an `as_ipex` program find IPEX here.

Its two modules replace themselves by the modules of `compat_ipex`.
"""

"""CUDA graph capture of inference graphs whose launches take longer than their kernels.

`reasons.py` says which graphs may be captured, `policy.py` decides by measuring, `cuda.py` captures
and replays, `code.py` wraps Inductor's code.
"""

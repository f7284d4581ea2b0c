"""Graphs of inference whose launches take longer than their work, captured in CUDA graphs.

`reasons.py` says which may be, `policy.py` decides by measuring, `cuda.py` captures and replays,
`code.py` is what stands around Inductor's code.
"""

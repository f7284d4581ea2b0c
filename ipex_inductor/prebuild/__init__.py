"""Ahead-of-time compilation of models, for processes that compile nothing.

`exporting` makes packages, `loading` runs them. A package is an entry of the kernel cache in a
bundle: native code that takes weights as it takes inputs, and the weight preprocessing as data.
Loading one needs neither Dynamo nor Inductor.
"""

"""Models compiled ahead, for processes that compile nothing: `exporting` makes, `loading` runs.

A package is an entry of the kernel cache in a bundle: native code that takes weights as it takes
inputs, and the weight prologue as data. Whoever loads it needs neither Dynamo nor Inductor.
"""

"""Random programs over all rules, judged by their twin in float64.

`PYTHONPATH=tests python -m fuzz` runs it; `program` is the data, `generate` makes it, `twin`
judges it, `compiled` judges generated code, `reduce` makes it small, `faults` tests the tester.
"""

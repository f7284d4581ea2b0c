"""Which of many cases run each time; the others are for -m slow."""

import pytest


def first_of_each(cases, kind):
    """The cases as parameters: slow but for the first of each `kind(*case)`."""
    known = set()
    for case in cases:
        is_first = (of := kind(*case)) not in known
        known.add(of)
        yield pytest.param(*case, marks=[] if is_first else pytest.mark.slow)

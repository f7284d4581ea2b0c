"""Which of many cases run each time; the others are for -m slow."""

import pytest


def covering(cases):
    """Numbers of few of the cases, tuples of values, that have each value of each place."""
    left = {value for case in cases for value in enumerate(case)}
    while left:
        best = max(range(len(cases)), key=lambda n: len(left.intersection(enumerate(cases[n]))))
        left.difference_update(enumerate(cases[best]))
        yield best


def few_with_each(cases, kind):
    """The cases as parameters: slow but for few that have each value of each place of `kind`."""
    cases = [*cases]
    quick = {*covering([kind(*case) for case in cases])}
    for number, case in enumerate(cases):
        yield pytest.param(*case, marks=[] if number in quick else pytest.mark.slow)

"""Which of many cases run each time; the others are for -m slow."""

from collections import defaultdict

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


def mark_slow_cases(items):
    """Mark the cases of tests that are `sampled`, but for the quick ones, as slow."""
    sampled = defaultdict(list)
    for item in items:
        if "sampled" in item.keywords and "slow" not in item.keywords:
            sampled[item.nodeid.partition("[")[0]].append(item)
    for cases in sampled.values():
        for number in {*range(len(cases))}.difference(quick_cases(cases)):
            cases[number].add_marker(pytest.mark.slow)


def quick_cases(cases):
    """Return the numbers of a sampled test's cases that run each time.

    They are those that `sampled` names by their ids, or a few that have each value where it names
    none, or none that this machine has.
    """
    ids = cases[0].get_closest_marker("sampled").args
    named = [number for number, item in enumerate(cases) if item.callspec.id in ids]
    if named:
        return named
    values = [tuple(map(id, item.callspec.params.values())) for item in cases]
    return covering(values) if len(values[0]) > 1 else range(0, len(values), 3)

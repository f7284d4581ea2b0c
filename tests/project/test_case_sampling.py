"""What runs each time has every value, and is few."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.case_sampling import covering, few_with_each, mark_slow_cases

pytestmark = pytest.mark.unit

DTYPES, GPUS = ("bfloat16", "float16", "float32"), ("a100", "h200", "b200", "mi300x")


def test_few_cases_have_each_value_of_each_place():
    cases = [*itertools.product(DTYPES, GPUS)]
    quick = [cases[number] for number in covering(cases)]
    assert {*map(len, map(set, zip(*quick, strict=True)))} == {len(DTYPES), len(GPUS)}
    assert len(quick) == len(GPUS)


def test_a_value_of_another_place_is_another_value():
    assert [*covering([(1, 2), (2, 1)])] == [0, 1]


def test_the_first_of_those_that_are_alike_and_all_the_others_are_slow():
    cases = itertools.product(("large", "small"), DTYPES, GPUS)
    given = [*few_with_each(cases, lambda tile, *others: others)]
    quick = [param.values for param in given if not param.marks]
    assert len(given) == 2 * len(DTYPES) * len(GPUS)
    assert len(quick) == len(GPUS)
    assert {tile for tile, *_ in quick} == {"large"}


class Item:
    """What the hook reads of a test's case."""

    def __init__(self, name, params, *ids, more=()):
        values = "-".join(map(str, params.values()))
        self.nodeid, self.marks = f"{name}[{values}]", [*more, pytest.mark.sampled(*ids)]
        self.callspec = SimpleNamespace(id=values, params=params)

    @property
    def keywords(self):
        return {mark.name for mark in self.marks}

    def get_closest_marker(self, name):
        return next(mark for mark in self.marks if mark.name == name)

    def add_marker(self, mark):
        self.marks.append(mark)


def quick(items):
    """Return the ids of the cases that stay quick."""
    mark_slow_cases(items)
    return [item.callspec.id for item in items if "slow" not in item.keywords]


def test_of_one_parameter_each_third_is_quick():
    assert quick([Item("one", {"a": n}) for n in range(7)]) == ["0", "3", "6"]


def test_of_several_a_few_that_have_each_value_are_quick():
    items = [Item("two", {"a": a, "b": b}) for a in range(4) for b in "xyz"]
    assert len(quick(items)) == 4


def test_cases_that_are_named_are_quick():
    assert quick([Item("one", {"a": n}, "1", "5") for n in range(7)]) == ["1", "5"]


def test_names_that_a_machine_does_not_have_leave_each_third():
    assert quick([Item("one", {"a": n}, "other") for n in range(4)]) == ["0", "3"]


def test_what_is_slow_by_itself_stays_so():
    items = [Item("one", {"a": n}, "0", "1", more=[pytest.mark.slow] * (n == 1)) for n in range(3)]
    assert quick(items) == ["0"]


SAMPLED = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("a", range(4))
def test_of_two(a, b):
    pass

@pytest.mark.sampled
@pytest.mark.parametrize("a", range(7))
def test_of_one(a):
    pass

@pytest.mark.sampled("1", "5")
@pytest.mark.parametrize("a", range(7))
def test_of_names(a):
    pass
"""


@pytest.mark.slow  # 10 s of imports; that conftest.py calls what is tried above
def test_sampled_cases_are_slow_but_for_those(tmp_path):
    """By conftest.py's own hook, of a file that stands in for many."""
    tests = Path(__file__).parents[1]
    (tmp_path / "test_sampled.py").write_text(SAMPLED)
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow"]
    command += ["-p", "no:xdist", "-c", str(tests.parent / "pyproject.toml"), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), os.environ["PYTHONPATH"]])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    found = [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]
    assert [name for name in found if "one" in name] == [f"test_of_one[{n}]" for n in (0, 3, 6)]
    assert len([name for name in found if "two" in name]) == 4
    assert [name for name in found if "names" in name] == ["test_of_names[1]", "test_of_names[5]"]

"""What runs each time has every value, and is few."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.case_sampling import covering, few_with_each

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
"""


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

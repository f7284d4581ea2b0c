"""CHANGELOG.md keeps the form of Keep a Changelog, one line for each entry."""

import re
from pathlib import Path

import pytest

import ipex_inductor

pytestmark = pytest.mark.unit

LINES = (Path(__file__).parents[2] / "CHANGELOG.md").read_text().splitlines()
KINDS = ["Added", "Changed", "Fixed", "Removed"]


def headings(mark):
    return [line.removeprefix(mark) for line in LINES if line.startswith(mark)]


def test_the_last_release_is_this_version():
    unreleased, *releases = headings("## ")
    assert unreleased == "[Unreleased]"
    assert re.fullmatch(r"\[(.+)\] - \d{4}-\d\d-\d\d", releases[0])[1] == ipex_inductor.__version__


def test_entries_are_grouped_by_kind():
    kinds = headings("### ")
    assert set(kinds) <= set(KINDS)
    assert kinds[-len(KINDS) :] == KINDS


def test_an_entry_is_a_line_and_short():
    start = LINES.index("## [Unreleased]")
    entries = [line for line in LINES[start:] if line and not line.startswith("#")]
    assert entries
    # A line that is no entry titles a group of them.
    assert all(re.fullmatch(r"- [A-Z`a-z].{1,237}[.`]|[A-Z`].{1,98}:", line) for line in entries)


def test_no_entry_is_there_twice():
    entries = [line for line in LINES if line.startswith("- ")]
    assert len({*entries}) == len(entries)

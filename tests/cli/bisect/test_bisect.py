"""The search of `ipex-inductor bisect` on made-up faults; its exit codes; nothing is compiled."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ipex_inductor.cli import app
from ipex_inductor.cli.bisect import trials
from ipex_inductor.cli.bisect.search import REST, Finding, Outcome, Parts, minimal, search

pytestmark = pytest.mark.unit

NAMES = [f"rule{i}" for i in range(24)]
EVERYTHING = Parts(NAMES)
FINE = Outcome(False)


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_minimal_finds_exactly_the_parts_that_are_bad_together(guilty):
    assert set(minimal(NAMES, lambda on: guilty <= on)) == guilty


@given(st.sampled_from(NAMES))
def test_one_of_24_takes_at_most_10_runs(guilty):
    runs = []

    def bad(on):
        runs.append(on)
        return guilty in on

    assert minimal(NAMES, bad) == [guilty]
    assert len(runs) <= 10  # two a halving


@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1, max_size=3), min_size=1, max_size=4))
def test_all_culprits_are_found_and_switching_off_the_named_ones_is_enough(faults):
    def run(off):
        if off is None:
            return FINE
        on = EVERYTHING - off
        return Outcome(any(fault <= on for fault in faults), on)

    finding = search(run, EVERYTHING)
    assert finding.status == "found"
    assert not run(finding.off).bad
    for culprit in finding.culprits:
        assert set(culprit) in faults
        assert run(EVERYTHING - set(culprit)).bad


def test_a_part_that_comes_in_only_for_another_is_found_too():
    """conv2d+add+relu off: conv2d+add fires in its place."""

    def run(off):
        if off is None:
            return FINE
        fires = "long" if "long" not in off else "short"
        return Outcome(fires not in off, Parts({fires, "innocent"}) - off)

    finding = search(run, Parts({"long", "short", "innocent"}))
    assert finding.culprits == (("long",), ("short",))
    assert finding.off == {"long", "short"}


def test_a_part_that_never_says_it_takes_part_is_found_too():
    def run(off):
        return FINE if off is None else Outcome("quiet" not in off)

    finding = search(run, Parts({"quiet", "loud"}))
    assert finding.culprits == (("quiet",),)


def test_only_what_took_part_is_suspected():
    tried = []

    def run(off):
        if off is None:
            return FINE
        tried.append(EVERYTHING - off)
        return Outcome("rule3" not in off, Parts({"rule3", "rule7"}) - off, "off by one")

    assert search(run, EVERYTHING).detail == "off by one"
    assert all(on <= {"rule3", "rule7"} for on in tried if on != EVERYTHING and len(on) < 20)
    assert len(tried) == len(set(tried)), "a run was repeated"


def test_nothing_wrong_takes_one_run():
    runs = []
    assert search(lambda off: runs.append(off) or Outcome(False), EVERYTHING) == Finding("fine")
    assert runs == [Parts()]


def test_wrong_in_plain_inductor_too_is_not_ours():
    finding = search(lambda off: Outcome(True, detail="nan"), EVERYTHING)
    assert (finding.status, finding.culprits, finding.detail) == ("not ours", (), "nan")


def test_what_is_wrong_with_every_part_off_but_not_in_inductor_is_the_rest():
    finding = search(lambda off: Outcome(off is not None, EVERYTHING), EVERYTHING)
    assert (finding.culprits, finding.off) == (((REST,),), {REST})


OPTIONS = {
    (): {},
    ("linear+gelu",): {"rules": "-linear+gelu"},
    ("linear+relu", "linear+gelu"): {"rules": "-linear+gelu,-linear+relu"},
    ("weight preprocessing",): {"weight_prologue": False},
    (REST,): {"rules": "-*", "weight_prologue": False},
    ("weight preprocessing", "linear+gelu"): {"rules": "-linear+gelu", "weight_prologue": False},
}


@pytest.mark.parametrize("off", OPTIONS, ids=str)
def test_options_switch_exactly_these_off(off):
    assert trials.options_without(Parts(off)) == OPTIONS[off]


MODEL = """
import torch
def make():
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    (tmp_path / "made_for_bisect.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def run(*args, outcome=None):
        monkeypatch.setattr(trials.Trial, "check", lambda self, off: outcome(off))
        return CliRunner().invoke(app, ["bisect", "made_for_bisect:make", *args])

    return run


def together(*names):
    """Bad where all of these are on."""
    pair = Parts(names)
    return lambda off: Outcome(off is not None and not pair & off, pair, "too large")


def test_found_is_exit_code_0_and_names_the_option(invoke):
    done = invoke(outcome=together("linear+gelu"))
    assert done.exit_code == 0, done.output
    assert "Culprit: linear+gelu" in done.output
    assert "options={'rules': '-linear+gelu'}" in done.output
    assert "too large" in done.output


def test_parts_that_are_bad_together_are_named_together(invoke):
    done = invoke("--json", outcome=together("linear+gelu", "weight preprocessing"))
    told = json.loads(done.stdout)
    assert told["culprits"] == [["linear+gelu", "weight preprocessing"]]
    assert told["options"] == {"rules": "-linear+gelu"}


@pytest.mark.parametrize(("bad", "said"), [(False, "Nothing is wrong"), (True, "not ours")])
def test_nothing_of_ours_is_exit_code_1(invoke, bad, said):
    done = invoke(outcome=lambda off: Outcome(bad))
    assert done.exit_code == 1
    assert said in done.output


@pytest.mark.parametrize("name", ["resnet51", "no_such_module:make", "made_for_bisect:nothing"])
def test_a_model_that_cannot_be_loaded_is_exit_code_2(invoke, name):
    done = CliRunner().invoke(app, ["bisect", name])
    assert done.exit_code == 2
    assert "error: expected" in done.stderr

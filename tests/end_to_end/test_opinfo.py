"""Torch's own case lists, held to eager: the share of `make opinfo` that runs every time."""

import json
from collections import Counter

import pytest
import torch

from ipex_inductor import compat
from opinfo import __main__ as command
from opinfo import cases, check, runner, sampling
from opinfo.cases import Case

CHEAP = Case("op", "add", "float32", "weights")
IN_PLACE = Case("op", "add", "float32", "in place")


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small are faster on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("part", range(sampling.TRAINED + sampling.OTHERS))
def test_sample(part, monkeypatch):
    """All pass, in one graph: a case that breaks it would have it compiled in parts."""
    group, graphs = sampling.part(part), []
    compare = check._compiled_and_compared
    monkeypatch.setattr(
        check, "_compiled_and_compared", lambda *given: graphs.append(given) or compare(*given)
    )
    rows = check.check(group)
    wrong = [f"{row.status}: {row.case}: {row.reason}" for row in rows if row.status != "pass"]
    assert not wrong, "\n".join(wrong)
    assert len(rows) == len(group)
    assert len(graphs) == 1


def test_the_sample_has_every_kind_of_case():
    sample = sampling.sample()
    assert len(sample) == len(set(sample)) == sampling.SIZE
    parts = map(sampling.part, range(sampling.TRAINED + sampling.OTHERS))
    assert {case for part in parts for case in part} == {*sample}
    ways = Counter(case.way for case in sample)
    assert min(ways[way] for way in cases.WAYS) >= 10
    assert {case.dtype for case in sample} == cases.DTYPES.keys()
    assert {case.kind for case in sample} == {*runner.KINDS}
    here = {name for _, name in cases.entries()}
    assert {case.name for case in sample} >= here.intersection(sampling.NAMED)
    assert len(here.intersection(sampling.NAMED)) > 0.95 * len(sampling.NAMED)
    assert not any(cases.row_of(case, "both_wrong") for case in sample)


def test_the_lists_are_whole():
    every = cases.every()
    assert len(every) == len({*map(str, every)}) > 4000
    count = Counter(kind for kind, _ in {(case.kind, case.name) for case in every})
    assert count["op"] > 550
    assert count["module"] > 100
    assert count["foreach"] > 40
    rows = [*cases.table("excluded"), *cases.table("both_wrong")]
    listed = {name for row in rows for name in row["names"]}
    assert listed <= {name for _, name in cases.entries()}
    assert all(row["reason"] for row in rows)


def _changed(change):
    """A compiler of graphs whose results are changed."""

    def compile_inner(gm, example_inputs, **_):
        def call(inputs):
            given = list(inputs)
            inputs.clear()
            return change(gm(*given))

        call._boxed_call = True
        return call

    return compile_inner


def _of_last(change):
    return lambda results: (*results[:-1], change(results[-1]))


@pytest.mark.sampled("value", "nan")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_of_last(lambda x: x * 1.001), "elements differ"),
        (_of_last(lambda x: x.bfloat16()), "bfloat16"),
        (_of_last(lambda x: x.new_full(x.shape, torch.nan)), "nan"),
    ],
    ids=["value", "dtype", "nan"],
)
def test_a_fault_of_ours_is_found(monkeypatch, change, said):
    monkeypatch.setattr(compat, "compile_inner", _changed(change))
    (row,) = check.check([CHEAP])
    assert row.status == "ours"
    assert said in row.reason


def test_of_a_group_the_wrong_one_is_named(monkeypatch):
    """And the others pass."""
    monkeypatch.setattr(compat, "compile_inner", _changed(lambda results: results))
    monkeypatch.setattr(cases, "tolerances", lambda case: None if case == IN_PLACE else (1, 1))
    monkeypatch.setattr(check, "_differs", lambda *args: "" if args[3] else "it does")
    rows = {row.case: row.status for row in check.check([CHEAP, IN_PLACE])}
    assert rows == {str(CHEAP): "pass", str(IN_PLACE): "both"}


def test_a_fault_of_a_gradient_is_found(monkeypatch):
    training = Case("op", "mul", "float32", "training")
    monkeypatch.setattr(compat, "compile_inner", _changed(_of_last(lambda x: x + 1)))
    (row,) = check.check([training])
    assert row.status == "ours"


def test_a_listed_case_that_passes_fails(monkeypatch):
    row = {"names": ["add"], "ways": ["weights"], "reason": "rounds twice"}
    monkeypatch.setattr(cases, "table", lambda name: (row,))
    judged = runner.judged(CHEAP, check.Row(str(CHEAP), "pass"))
    assert judged.status == "unlisted"
    assert runner.judged(CHEAP, check.Row(str(CHEAP), "both")).status == "listed"
    assert runner.judged(IN_PLACE, check.Row(str(IN_PLACE), "both")).status == "both"


@pytest.mark.parametrize(
    ("version", "speaks"),
    [("2.10.1", False), ("2.11.0+cpu", True), ("2.13.2", True), ("2.14.0.dev20260101", False)],
)
def test_a_row_may_speak_of_some_torches(monkeypatch, version, speaks):
    row = {"names": ["add"], "torch": ">=2.11,<2.14", "reason": "rounds twice"}
    monkeypatch.setattr(cases, "table", lambda name: (row,))
    monkeypatch.setattr(torch, "__version__", version)
    assert (cases.row_of(CHEAP, "both_wrong") is row) is speaks
    assert (cases.why_excluded(CHEAP) == "rounds twice") is speaks


@pytest.mark.parametrize(("theirs", "status"), [(False, "together"), (True, "both")])
def test_what_is_wrong_only_beside_others_is_no_pass(theirs, status, monkeypatch):
    """Each wrong case is compiled by itself, and the group by plain Inductor."""
    compiled = []

    def compare(todo, backend):
        compiled.append(([*todo], backend))
        wrong = {case: "it differs" for case in todo if case == IN_PLACE}
        right = len(todo) == 1 or (backend == "inductor" and not theirs)
        return check.Found(wrong={} if right else wrong)

    monkeypatch.setattr(check, "_compiled_and_compared", compare)
    rows = {row.case: row.status for row in check.check([CHEAP, IN_PLACE])}
    assert rows == {str(CHEAP): "pass", str(IN_PLACE): status}
    group = [CHEAP, IN_PLACE]
    assert compiled == [(group, "ipex"), ([IN_PLACE], "ipex"), (group, "inductor")]


def test_a_row_of_what_is_wrong_beside_others_may_pass(monkeypatch):
    row = {"names": ["add"], "ways": ["weights"], "together": True, "reason": "rounds twice"}
    monkeypatch.setattr(cases, "table", lambda name: (row,))
    assert runner.judged(CHEAP, check.Row(str(CHEAP), "pass")).status == "pass"
    assert runner.judged(CHEAP, check.Row(str(CHEAP), "both")).status == "listed"


@pytest.mark.slow  # 11 s, of the comparison itself
def test_what_dynamo_leaves_to_eager_is_no_pass():
    """A tensor as `start` of narrow: the whole graph ran in eager, and all others of its group."""
    narrow = Case("op", "narrow", "float32", "weights")
    assert check._compiled_and_compared({CHEAP: [0], narrow: [0]}, "ipex").error == check.LEFT
    rows = {row.case: row.status for row in check.check([CHEAP, narrow])}
    assert rows == {str(CHEAP): "pass", str(narrow): "skip"}


def test_names_of_what_is_held_are_the_same_in_every_group():
    """Else values of a group are not compared with exact ones, which are of a case by itself."""
    first, second = cases.samples(CHEAP), cases.samples(CHEAP)
    alone, together = cases.Together(second[:1]), cases.Together([*first, *second])
    assert alone.held_of[0].keys() == together.held_of[len(first)].keys()
    assert alone.held_of[0]


def test_a_group_that_raises_is_parted(monkeypatch):
    def compare(todo, backend):
        return check.Found("raises" if IN_PLACE in todo and backend == "ipex" else "")

    monkeypatch.setattr(check, "_compiled_and_compared", compare)
    rows = {row.case: row.status for row in check.check([CHEAP, IN_PLACE])}
    assert rows == {str(CHEAP): "pass", str(IN_PLACE): "ours"}


def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    asked = []

    def rows(todo, *_):
        asked.append([str(case) for case in todo])
        yield from ({"case": str(case), "status": "pass", "reason": ""} for case in todo[:2])

    monkeypatch.setattr(runner, "rows", rows)
    results = tmp_path / "rows.jsonl"
    line = ["opinfo", "--results", str(results), "--only", "^add-", "--ways", "weights,training"]
    monkeypatch.setattr("sys.argv", line)
    assert command.main() == 0  # which is stopped after two
    first = [json.loads(text)["case"] for text in results.read_text().splitlines()]
    assert command.main() == 0
    assert asked[1] == [case for case in asked[0] if case not in first]
    assert "pass: 4" in capsys.readouterr().out

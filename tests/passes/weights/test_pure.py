"""Graphs that run while a GPU compares their weights, and again if one was written."""

import ctypes
import math
import operator
import weakref
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.passes.weights import pure, weight_snapshot
from ipex_inductor.passes.weights.output_code import PrologueCode
from ipex_inductor.passes.weights.program import Program, Ref, Step
from ipex_inductor.runtime.untouched_weights import assume_untouched

pytestmark = pytest.mark.unit

X, W = torch.randn(4, 4), torch.randn(4, 4)


@torch.library.custom_op("ipex_tests::unknown_of_pure", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


GRAPHS = {
    "products": (lambda x, w: (x @ w).relu(), True),
    "several results": (lambda x, w: (x @ w).max(1), True),
    "writes an input": (lambda x, w: x.add_(w), False),
    "draws": (lambda x, w: x + torch.rand_like(w), False),
    "dropout": (lambda x, w: torch.dropout(x @ w, 0.5, True), False),
    "running statistics": (
        lambda x, w: torch.batch_norm_update_stats(x, w[0].clone(), w[1].clone(), 0.1),
        False,
    ),
    "asserts": (lambda x, w: torch._assert_async((x != 7).any()) or x @ w, False),
    "a user's operator": (lambda x, w: unknown(x) @ w, False),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_repeats(name):
    function, expected = GRAPHS[name]
    graph = make_fx(function)(X.clone(), W).graph
    assert pure.is_repeatable(graph, ()) == expected


def test_sizes_are_no_effect():
    trace = make_fx(
        lambda x, w: x.reshape(x.shape[0] * x.shape[1] // 2, -1) @ w, tracing_mode="symbolic"
    )
    gm = trace(torch.randn(6, 4), torch.randn(2, 3))
    targets = {node.target for node in gm.graph.nodes}
    assert operator.mul in targets
    assert pure.is_repeatable(gm.graph, ())


def test_large_inputs_are_not_held(monkeypatch):
    gm = make_fx(lambda x, w: x @ w)(X, W)
    monkeypatch.setattr(pure, "HELD", X.nbytes)
    assert not pure.is_repeatable(gm.graph, ())
    assert pure.is_repeatable(gm.graph, gm.graph.find_nodes(op="placeholder")[1:])


class Comparing:
    """A comparison on a GPU, which finds what was written since `seen` was copied."""

    def __init__(self, weight):
        self.weight, self.seen, self.events = weight, weight.clone(), []
        self.answers = True

    def launch(self):
        self.events.append("launch")
        return [([0], self, len(self.events))]

    def is_answered(self):
        return self.answers

    def find_differing(self, ticket):
        self.events.append("result")
        return None if torch.equal(self.weight, self.seen) else 0

    def forget(self):
        self.events.append("forgotten")


def compare(code, weight):
    """Have `weight` compared as on a GPU alone, not on the CPU."""
    (snapshot,) = code._derived._snapshots.values()
    comparing = Comparing(weight)
    snapshot.current = replace(snapshot.current, contents=None, on_devices=comparing)
    return comparing


def write(weight, value):
    """Write an element as neither torch nor a look at aliases sees."""
    ctypes.c_float.from_address(weight.data_ptr()).value = value


def code_of(inner, repeats):
    program = Program((1,), ("",), (Step("aten::mul.Tensor", (Ref(0), 2.0), ()),), (Ref(1),))
    return PrologueCode(inner, (program,), (0,), captured=False, repeats=repeats)


@pytest.fixture
def subject(request, monkeypatch):
    """Code that multiplies an input by twice a weight; its inputs, and the runs of its graph."""
    monkeypatch.setattr(weight_snapshot, "UNPAID", 100)
    weight, x, runs = torch.randn(4, 4), torch.randn(4, 4), []

    def inner(inputs):
        given, derived = inputs
        inputs.clear()  # as Inductor's own graphs do
        runs.append(derived.clone())
        if runs[-1].isnan().any():
            raise IndexError("as in a trial")
        return [given @ derived]

    code = code_of(inner, request.param)
    code([x, weight])
    return code, x, weight, runs


REPEATS = pytest.mark.parametrize("subject", [True, False], ids=["repeats", "once"], indirect=True)


@REPEATS
def test_a_graph_runs_before_the_result_only_where_it_repeats(subject, warned):
    code, x, weight, runs = subject
    comparing = compare(code, weight)
    runs.clear()
    (result,) = code([x, weight])
    assert torch.equal(result, x @ (weight * 2))
    assert len(runs) == 1
    assert comparing.events == ["launch", "result"]
    write(weight, 7.0)
    inputs = [x, weight]
    (result,) = code(inputs)
    assert torch.equal(result, x @ (weight * 2))
    assert len(runs) == (3 if code.repeats else 2)
    assert not inputs
    assert ["does not see" in text for text in warned] == [True]


@REPEATS
def test_a_write_before_each_call_is_seen(subject):
    code, x, weight, _ = subject
    for n in range(6):
        compare(code, weight)
        write(weight, float(n))
        (result,) = code([x, weight])
        assert torch.equal(result, x @ (weight * 2)), n


@REPEATS
def test_each_of_two_threads_learns_of_a_write(subject):
    """Both compare before one of them has the results computed again."""
    code, x, weight, _ = subject
    compare(code, weight)
    first = []
    code._derived.of([x, weight], first)
    write(weight, 7.0)
    (result,) = code([x, weight])
    assert torch.equal(result, x @ (weight * 2))
    assert not code._derived.are_confirmed([x, weight], first)


@REPEATS
def test_weights_written_with_what_they_held_are_no_change(subject, warned):
    code, x, weight, runs = subject
    comparing = compare(code, weight)
    comparing.seen = weight + 1
    runs.clear()
    (result,) = code([x, weight])
    assert torch.equal(result, x @ (weight * 2))
    assert len(runs) == 1
    assert comparing.events == ["launch", "result", "forgotten"]
    assert not warned


@REPEATS
def test_what_old_contents_raise_is_not_raised(subject):
    code, x, weight, _ = subject
    write(weight, math.nan)
    code._derived._snapshots.clear()
    code._derived._by_ends.clear()
    with pytest.raises(IndexError):
        code([x, weight])
    compare(code, weight)
    with pytest.raises(IndexError):  # as it is that of the present contents
        code([x, weight])
    write(weight, 1.0)
    (result,) = code([x, weight])
    assert torch.equal(result, x @ (weight * 2))


@REPEATS
def test_old_results_are_freed_before_new_ones_are_computed(subject, monkeypatch):
    code, x, weight, _ = subject
    compare(code, weight)
    (snapshot,) = code._derived._snapshots.values()
    old = weakref.ref(snapshot.current)
    write(weight, 7.0)
    seen, compute = [], code._derived._compute
    monkeypatch.setattr(
        code._derived, "_compute", lambda *args: seen.append(old()) or compute(*args)
    )
    code([x, weight])
    assert seen == [None]


@REPEATS
def test_untouched_weights_are_not_compared_but_their_versions_are(subject):
    code, x, weight, _ = subject
    comparing = compare(code, weight)
    with assume_untouched():
        code([x, weight])
        with assume_untouched(False):
            code([x, weight])
        assert comparing.events == []
        weight.mul_(3)
        (result,) = code([x, weight])
    assert torch.equal(result, x @ (weight * 2))
    comparing = compare(code, weight)
    code([x, weight])
    assert comparing.events == ["launch", "result"]


@REPEATS
def test_a_comparison_without_an_answer_is_made_again(subject):
    code, x, weight, _ = subject
    comparing = compare(code, weight)
    comparing.answers = False
    with assume_untouched():
        code([x, weight])
    assert comparing.events == ["launch", "result"]

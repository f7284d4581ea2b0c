"""Graphs that run while a GPU compares their weights, and again if one was written."""

import ctypes
import operator
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.passes import pure
from ipex_inductor.passes.output_code import PrologueCode
from ipex_inductor.passes.program import Program, Ref, Step

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

    def launch(self):
        self.events.append("launch")
        return [([0], self, len(self.events))]

    def find_differing(self, ticket):
        self.events.append("result")
        return None if torch.equal(self.weight, self.seen) else 0


def code_of(inner, repeats):
    program = Program((1,), ("",), (Step("aten::mul.Tensor", (Ref(0), 2.0), ()),), (Ref(1),))
    return PrologueCode(inner, (program,), (0,), captured=False, repeats=repeats)


@pytest.mark.parametrize("repeats", [True, False])
def test_a_graph_runs_before_the_result_only_where_it_repeats(repeats, warned):
    weight, x = torch.randn(4, 4), torch.randn(4, 4)
    comparing, runs = Comparing(weight), []

    def inner(inputs):
        comparing.events.append("graph")
        given, derived = inputs
        inputs.clear()  # as Inductor's own graphs do
        runs.append(given)
        return [given @ derived]

    code = code_of(inner, repeats)
    code([x, weight])
    (snapshot,) = code._derived._snapshots.values()
    # No contents are compared on the CPU, so that the write below is left to the other.
    snapshot.current = replace(snapshot.current, contents=None, on_devices=comparing)
    comparing.events.clear()
    (result,) = code([x, weight])
    assert torch.equal(result, x @ (weight * 2))
    order = ["launch", "graph", "result"] if repeats else ["launch", "result", "graph"]
    assert comparing.events == order
    comparing.events.clear()
    ctypes.c_float.from_address(weight.data_ptr()).value = 7.0
    inputs = [x, weight]
    (result,) = code(inputs)
    assert torch.equal(result, x @ (weight * 2))
    assert comparing.events == (["launch", "graph", "result", "graph"] if repeats else order)
    assert all(given is x for given in runs)
    assert not inputs
    assert ["does not see" in text for text in warned] == [True]

"""Run one pass on the graph of a function, and compare what both compute."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.passes.engine.whole_ops import reduced_table
from ipex_inductor.passes.joint import WHOLE
from ipex_inductor.reporting.decisions import GraphReport

# A sum of some hundred products in another order, each product rounded to the dtype once.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def trace(fn: Callable[..., Any], *inputs: Tensor) -> tuple[torch.fx.GraphModule, FakeTensorMode]:
    """Return the graph of a function as passes see it, and the mode of its fake values."""
    mode = FakeTensorMode()
    fakes = [*map(mode.from_tensor, inputs)]
    with torch.no_grad(), mode, enable_python_dispatcher():
        gm = make_fx(fn, reduced_table(WHOLE))(*fakes)
    gm.graph.eliminate_dead_code()
    return gm, mode


def rewrite(
    run: Callable[[torch.fx.Graph, GraphReport], object], fn: Callable[..., Any], *inputs: Tensor
) -> tuple[torch.fx.GraphModule, list[tuple[str, str, str]]]:
    """Return the graph of a function behind a pass, and the events that the pass reported.

    The graph's result has the values and the strides of the function's.

    Args:
        run: The pass.
        fn: A function of the inputs that returns a tensor.
        *inputs: Weights first, if the pass asks for them.
    """
    gm, mode = trace(fn, *inputs)
    report = GraphReport()
    with V.set_fake_mode(mode), torch.no_grad():
        run(gm.graph, report)
    gm.graph.lint()
    gm.recompile()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        assert node.op != "call_function" or value is not None, node
    with torch.no_grad():
        result, expected = gm(*inputs), fn(*inputs)
    error = (result.double() - expected.double()).norm() / expected.double().norm()
    assert error <= TOLERANCES[expected.dtype], error
    assert result.stride() == expected.stride()
    return gm, [(event.kind, event.subject, event.reason) for event in report.events]


def count(gm: torch.fx.GraphModule, op: Any) -> int:
    """Return how many calls of an op a graph has."""
    return len(gm.graph.find_nodes(op="call_function", target=op))

"""Graphs on the meta device, which are rewritten as those on an H200 are."""

import torch
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import ipex_inductor.ops  # noqa: F401  what graphs are of
from ipex_inductor.autotune.pool import Estimate
from ipex_inductor.autotune.record import encode
from ipex_inductor.autotune.select import Selection
from ipex_inductor.lowerings.select import library
from ipex_inductor.passes.engine.whole_ops import WHOLE, reduced_table
from ipex_inductor.passes.fusion.library import place
from ipex_inductor.reporting.decisions import GraphReport

H200 = "sm_90:NVIDIA-H200"
LAST = torch.channels_last
CONV = torch.ops.ipex.conv.default


def conv(x, weight, bias, other=None, *, stride=1, padding=0, groups=1, unary="relu", scalars=()):
    binary = "none" if other is None else "add"
    window = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    return CONV(x, weight, bias, other, *window, binary, unary, [*scalars], "")


def traced(fn, *inputs, table=None):
    """The graph of `fn` on the meta device, decomposed by `table`."""
    mode = FakeTensorMode()
    with mode:
        like = ((t.size(), t.stride(), t.dtype) for t in inputs)
        fakes = [torch.empty_strided(*s, dtype=dtype, device="meta") for *s, dtype in like]
    return mode, make_fx(fn, decomposition_table=table)(*fakes)


def image(*shape, dtype=torch.bfloat16, format=LAST):
    return torch.randn(shape, dtype=dtype).to(memory_format=format)


def selected(problem, name, source="recorded"):
    choice = next(c.choice for c in library.calls(problem) if c.name == name)
    return {encode(problem): Selection(Estimate(choice, 5.0, 0.01), None, source)}


def placed(fn, *inputs, choose, weights=(), table=None):
    """The graph after `place`, and its report."""
    mode, gm = traced(fn, *inputs, table=table)
    gm.graph.eliminate_dead_code()
    known = [n for n in gm.graph.nodes if n.op == "placeholder" and n.name in weights]
    report = GraphReport()
    with V.set_fake_mode(mode):
        place(gm.graph, choose, known, reduced_table(frozenset(WHOLE)), report)
    gm.graph.lint()
    gm.recompile()
    return gm, report


def targets(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]

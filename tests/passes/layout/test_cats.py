"""Concatenations whose parts others read: which are ours, what they give, and how it lies."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor import compat, lowerings
from ipex_inductor.passes.layout import cats
from ipex_inductor.reporting.decisions import GraphReport

pytestmark = pytest.mark.unit

OURS = torch.ops.ipex.cat.default
LAST = torch.channels_last


def shared(a, b):
    """A block of a YOLO: halves, one of them read again by what stands beside it."""
    y, z = F.silu(a).chunk(2, 1)
    return torch.cat([y, z, z + F.silu(b)], 1)


def read_by_a_product(a, b):
    y = F.silu(a)
    return torch.cat([y, b], 1), y.flatten(1) @ y.flatten(1).t()


def alone(a, b):
    return torch.cat([F.silu(a), F.silu(b)], 1)


def inputs(a, b):
    return torch.cat([a, b], 1), a + 1


def rotated(a, b):
    """Halves of one tensor, each read once: a kernel of who reads the result."""
    y, z = a.chunk(2, 1)
    return torch.cat([-z, y], 1) * a


def mixed(a, b):
    y = F.silu(a)
    return torch.cat([y, b.double()], 1), y + 1


def rewritten(fn, device, monkeypatch, again=True):
    monkeypatch.setattr(compat, "computes_shared_parts_again", lambda: again)
    report = GraphReport()
    with FakeTensorMode():
        a, b = (torch.empty(2, n, 6, 6, device=device) for n in (8, 4))
        gm = make_fx(fn)(a, b)
    cats.rewrite(gm.graph, report)
    gm.graph.lint()
    found = len(gm.graph.find_nodes(op="call_function", target=OURS))
    return found, [(event.kind, event.reason) for event in report.events]


@pytest.mark.parametrize(
    ("fn", "events"),
    [
        (shared, [("fired", "3 parts")]),
        (read_by_a_product, [("fired", "2 parts")]),
        (alone, []),
        (inputs, []),
        (rotated, []),
        (mixed, [("missed", "its parts are of several dtypes")]),
    ],
)
def test_which_are_ours(fn, events, monkeypatch):
    before = counters["ipex"][cats.NAME]
    found, said = rewritten(fn, "cuda", monkeypatch)
    assert said == events
    assert found == sum(kind == "fired" for kind, _ in events)
    assert counters["ipex"][cats.NAME] == before + found


def test_none_on_a_cpu_nor_where_inductor_does_it(monkeypatch):
    assert rewritten(shared, "cpu", monkeypatch) == (0, [])
    assert rewritten(shared, "cuda", monkeypatch, again=False) == (0, [])


@pytest.mark.sampled("loop-layout0", "convolution-layout1")
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("then", [lambda y, w: y * 2, F.conv2d], ids=["loop", "convolution"])
def test_values_and_layout_are_torchs(then, layout):
    """The sum of a part is rounded once in either; elements are copied."""
    lowerings.register()
    a, b = (torch.randn(2, n, 6, 6).to(memory_format=layout) for n in (8, 4))
    weight = torch.randn(5, 12, 3, 3).to(memory_format=layout)

    def ours(a, b):
        y, z = F.silu(a).chunk(2, 1)
        return then(torch.ops.ipex.cat([y, z, z + F.silu(b)], 1), weight)

    with torch.no_grad():
        result, expected = torch.compile(ours)(a, b), then(shared(a, b), weight)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


@pytest.mark.parametrize("dynamic", [False, True])
def test_dimensions_are_counted_from_the_end(dynamic):
    """As `torch.diff` does with what stands before (whole numbers, exact)."""
    lowerings.register()

    def fn(a, b):
        y = a * 2
        return torch.ops.ipex.cat([y, b], -1), y

    a, b = torch.arange(12).view(3, 4), torch.ones(3, 1, dtype=torch.int64)
    for got, expected in zip(torch.compile(fn, dynamic=dynamic)(a, b), fn(a, b), strict=True):
        assert torch.equal(got, expected)

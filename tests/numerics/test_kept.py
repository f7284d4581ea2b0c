"""Convolutions by oneDNN's kept primitives: what they compute, where they are taken, where not."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import code_of
from torch import nn

from ipex_inductor import decisions, graph_files
from ipex_inductor.lowerings import kept as lowering
from ipex_inductor.passes import kept as taken
from ipex_inductor.passes.packing import onednn_dtypes
from ipex_inductor.target import architecture
from ipex_inductor.templates import kept

pytestmark = pytest.mark.skipif(not kept.installed(), reason="onednn-cpu-gomp is not installed")
LAST = torch.channels_last
# One rounding of sums in fp32: of some thousand terms they are 2^-20 off, of what is largest.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """On CPUs for which nobody measured, too."""
    every = taken.Most(math.inf, math.inf, math.inf)
    monkeypatch.setattr(taken, "FASTER", {(architecture(), dtype): every for dtype in kept.TYPES})


class Conv(nn.Module):
    """A convolution with what may follow it."""

    def __init__(self, *args, add=False, relu=True, **how):
        super().__init__()
        self.conv, self.add, self.relu = nn.Conv2d(*args, **how), add, relu

    def forward(self, x, other=None):
        made = self.conv(x)
        made = made + other if self.add else made
        return F.relu(made) if self.relu else made


def compiled(model, **options):
    return torch.compile(model, backend="ipex", options={"strict": True, **options})


def said():
    return [e.reason for r in decisions.reports() for e in r.events if "kept" in e.reason]


def check(model, *inputs, **options):
    """Against fp64; the result is channels-last. The compiled model."""
    fn = compiled(model, **options)
    out = fn(*inputs)
    exact = model.double()(*(x.double() for x in inputs))
    model.to(inputs[0].dtype)
    assert (out - exact).abs().max() <= CLOSE[out.dtype] * exact.abs().max()
    assert out.is_contiguous(memory_format=LAST)
    return fn


CASES = {
    "3x3": (16, 32, 3),
    "stem": (3, 24, 7, 2, 3),
    "strided, padded": (24, 40, (3, 5), (2, 1), (1, 2)),
    "dilated": (16, 16, 3, 1, 2, 2),
    "groups": (32, 48, 3, 1, 1, 1, 4),
    "depthwise": (32, 32, 3, 1, 1, 1, 32),
    "one pixel": (17, 13, 1),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values(name, add, dtype):
    torch.manual_seed(0)
    args = CASES[name]
    model = Conv(*args, add=add, relu=name != "groups", bias=name != "dilated").eval().to(dtype)
    x = torch.randn(2, args[0], 17, 15, dtype=dtype).to(memory_format=LAST)
    other = [torch.randn_like(model.conv(x))] if add else []
    if dtype not in onednn_dtypes():
        pytest.skip(f"this CPU's oneDNN has no {dtype}")
    check(model, x, *other)
    assert said() == ["1 by oneDNN's primitives, kept"]


@torch.no_grad()
def test_the_code_calls_it_and_weights_are_arranged_once(monkeypatch):
    arranged = []
    arrange = kept.arrange
    monkeypatch.setattr(kept, "arrange", lambda *a: arranged.append(1) or arrange(*a))
    model, x = Conv(16, 32, 3).eval(), torch.randn(1, 16, 9, 9).to(memory_format=LAST)
    fn = compiled(model)
    (code,) = code_of(fn, x)
    assert "from ipex_inductor.templates.kept import call as ipex_kept" in code
    assert "_convolution_pointwise" not in code
    fn(x)
    assert len(arranged) == 1
    with torch.no_grad():
        model.conv.weight.mul_(2)
        model.conv.bias.add_(1)
    torch.testing.assert_close(fn(x), model(x))
    assert len(arranged) == 2


@torch.no_grad()
def test_other_numbers_of_threads():
    """oneDNN makes a primitive for so many threads; a weight lies the same for all of them."""
    model, x = Conv(64, 64, 3, padding=1).eval(), torch.randn(2, 64, 28, 28).to(memory_format=LAST)
    usual, fn = torch.get_num_threads(), compiled(model)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.testing.assert_close(fn(x), model(x))
    finally:
        torch.set_num_threads(usual)


@torch.no_grad()
def test_threads_at_once():
    """Each with its own input, by one primitive."""
    model = Conv(32, 32, 3, padding=1).eval()
    fn, right = compiled(model), []
    inputs = [torch.randn(1, 32, 24, 24).to(memory_format=LAST) for _ in range(4)]
    fn(inputs[0])

    def work(x):
        wanted = model(x)
        right.extend(torch.allclose(fn(x), wanted, rtol=1e-5, atol=1e-5) for _ in range(50))

    with torch.no_grad():
        threads = [threading.Thread(target=torch.no_grad()(work), args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 200


@torch.no_grad()
@pytest.mark.parametrize("add", [False, True])
def test_a_process_without_the_library_is_slow_and_right(monkeypatch, add):
    """As of a cached graph: the weight lies as torch has it, and torch computes."""
    conv = nn.Conv2d(16, 32, 3, 2, 1, groups=2).eval()
    x = torch.randn(2, 16, 9, 9).to(memory_format=LAST)
    wanted = conv(x)
    other = torch.randn_like(wanted) if add else None
    words = (3, 2, 16, 9, 9, 32, (3, 3), (5, 5), (2, 2), (1, 1), (1, 1), 2, 1, int(add), 1)
    geometry = kept.Geometry(*words)
    tag, size = kept.layout(geometry)
    numbers = geometry.flat()
    assert kept.Geometry.of(numbers) == geometry
    wanted = torch.relu(wanted + other) if add else torch.relu(wanted)
    for gone in (False, True):
        if gone:
            monkeypatch.setattr(kept, "why_not", lambda: "it is gone")
        weight = torch.ops.ipex.kept_weight(conv.weight, numbers, tag, size // 4)
        made = torch.ops.ipex.kept_conv(x, weight, conv.bias, other, numbers, tag)
        torch.testing.assert_close(made, wanted)


def channels(*sizes, dtype=torch.float32):
    return torch.randn(sizes, dtype=dtype).to(memory_format=LAST)


class Silu(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return F.silu(self.conv(x))


NEAR = {
    "contiguous": (Conv(8, 8, 3), torch.randn(1, 8, 9, 9), {}),
    "another epilogue": (Silu(), channels(1, 8, 9, 9), {}),
    "a line": (nn.Conv1d(8, 8, 3), torch.randn(1, 8, 9), {}),
    "transposed": (nn.ConvTranspose2d(8, 8, 3), channels(1, 8, 9, 9), {}),
    "fp64": (Conv(8, 8, 3).double(), channels(1, 8, 9, 9, dtype=torch.float64), {}),
    "no kernel but a slow one": (Conv(1, 1, 2), channels(1, 1, 9, 9), {}),
    "off": (Conv(8, 8, 3), channels(1, 8, 9, 9), {"blocked_products": False}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", NEAR)
def test_what_is_left_to_torch(name):
    model, x, options = NEAR[name]
    fn = compiled(model.eval(), **options)
    torch.testing.assert_close(fn(x), model(x))
    assert not said()


@torch.no_grad()
def test_sizes_that_vary_are_left_to_torch():
    model = Conv(8, 8, 3).eval()
    fn = torch.compile(model, backend="ipex", dynamic=True, options={"strict": True})
    x = channels(2, 8, 9, 9)
    torch.testing.assert_close(fn(x), model(x))
    assert not said()


def test_generated_cpp_has_no_call_of_them():
    assert lowering.why_not() is None
    assert lowering.why_not(packaged=True) == "neither code in C++ nor for other CPUs calls them"


def test_a_graph_names_the_library_it_calls(monkeypatch):
    assert ("onednn", kept.installed()) in graph_files._toolkit()
    monkeypatch.setattr(graph_files, "version_of", lambda name: "")
    assert "onednn" not in dict(graph_files._toolkit())


def test_an_error_of_the_library_is_typed():
    words = (3, 1, 8, 9, 9, 8, (3, 3), (99, 7), (1, 1), (0, 0), (1, 1), 3, 1, 0, 1)
    with pytest.raises(kept.KeptError, match="oneDNN"):
        kept.layout(kept.Geometry(*words))

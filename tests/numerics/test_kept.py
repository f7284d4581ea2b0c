"""Convolutions by oneDNN's kept primitives: what they compute, where they are taken, where not."""

import ctypes
import math
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import code_of
from torch import nn

from ipex_inductor import compat, decisions, graph_files, inner, request
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
    every = taken.Most(*[math.inf] * 4)
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
    reasons = [e.reason for report in decisions.reports() for e in report.events]
    return [reason for reason in reasons if "primitives, kept" in reason]


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
def test_batches_share_a_weight(monkeypatch):
    arranged, arrange = [], kept.arrange
    monkeypatch.setattr(kept, "arrange", lambda *a: arranged.append(1) or arrange(*a))
    model = Conv(16, 32, 3).eval()
    fn = torch.compile(model, backend="ipex", dynamic=False, options={"strict": True})
    for batch in (1, 2):
        x = channels(batch, 16, 9, 9)
        torch.testing.assert_close(fn(x), model(x))
    assert said() == ["1 by oneDNN's primitives, kept"] * 2
    assert len(arranged) == 1


def a_call(dtype=torch.float32, batch=1, channels=16, side=9, made=32):
    """A convolution 3x3 by a primitive: input, weight, numbers, tag, arranged weight."""
    words = (kept.TYPES[dtype], batch, channels, side, side, made, (3, 3), (side - 2, side - 2))
    geometry = kept.Geometry(*words, (1, 1), (0, 0), (1, 1), 1, 0, 0, 0)
    tag, size = kept.layout(geometry)
    numbers, weight = geometry.flat(), torch.randn(made, channels, 3, 3, dtype=dtype)
    arranged = torch.ops.ipex.kept_weight(weight, 1, tag, size // weight.element_size())
    x = torch.randn(batch, channels, side, side, dtype=dtype).to(memory_format=LAST)
    return x, weight, numbers, tag, arranged


def run(x, arranged, numbers, tag):
    return torch.ops.ipex.kept_conv(x, arranged, None, None, numbers, tag)


def convolutions_done(capfd, work):
    """oneDNN's lines about the convolutions in `work`."""
    dnnl = ctypes.CDLL(kept.path())
    dnnl.dnnl_set_verbose(1)
    try:
        work()
    finally:
        dnnl.dnnl_set_verbose(0)
    ctypes.CDLL(None).fflush(None)
    return [line for line in capfd.readouterr().out.splitlines() if ",convolution," in line]


def one_each(**sizes):
    x, _, numbers, tag, arranged = a_call(**sizes)
    run(x, arranged, numbers, tag)


def test_no_layout_is_of_the_reference_kernel(capfd):
    """Of a weight with one channel several layouts are the same, and one has the fast kernel."""
    done = convolutions_done(capfd, lambda: [one_each(channels=n) for n in (1, 2, 3, 17)])
    assert len(done) == 4
    assert not [line for line in done if "ref" in line or "gemm" in line]


def test_each_number_of_threads_has_its_layout(capfd):
    """Behind one of another number's oneDNN has its reference kernel alone, of seconds a call.

    A thread that never computed has OpenMP's own number of threads until torch is asked for its.
    """
    usual = torch.get_num_threads()

    def work():
        for count in (16, 1):
            torch.set_num_threads(count)
            sizes = {"channels": 128, "made": 128, "side": 30}
            thread = threading.Thread(target=one_each, kwargs=sizes)
            thread.start()
            thread.join()

    try:
        done = convolutions_done(capfd, work)
    finally:
        torch.set_num_threads(usual)
    assert len(done) == 2
    assert not [line for line in done if "ref" in line or "gemm" in line]


@torch.no_grad()
def test_as_many_geometries_as_there_is_room_for(monkeypatch):
    """Shapes that come and go: oneDNN does not give back all that a primitive took."""
    monkeypatch.setattr(kept, "ROOM", kept._layout.cache_info().currsize + 1)
    model = Conv(8, 8, 3).eval()
    fn = torch.compile(model, backend="ipex", dynamic=False, options={"strict": True})
    for side in (37, 38):
        x = channels(1, 8, side, side)
        torch.testing.assert_close(fn(x), model(x))
    assert said() == ["1 by oneDNN's primitives, kept"]
    events = [e for report in decisions.reports() for e in report.events]
    missed = [e.reason for e in events if e.subject == "kept primitives"]
    assert missed == [f"there are {kept.ROOM} geometries in this process already"]


def test_the_same_bits_each_time():
    x, _, numbers, tag, arranged = a_call(torch.float32, 2, 64, 28, 64)
    first = run(x, arranged, numbers, tag)
    assert all(torch.equal(run(x, arranged, numbers, tag), first) for _ in range(5))


def test_tensors_that_begin_anywhere():
    """Addresses that vectors do not divide."""
    x, weight, numbers, tag, arranged = a_call(made=17)

    def moved(tensor):
        room = torch.empty(tensor.numel() + 1)[1:]
        return room.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)

    out = moved(F.conv2d(x, weight).contiguous(memory_format=LAST))
    wanted = out.clone()
    kept.call(moved(x), moved(arranged), tuple(numbers), tag, out=out.zero_())
    torch.testing.assert_close(out, wanted)


@torch.no_grad()
def test_a_fork_computes():
    """With one thread, as torch's own data loaders: GNU's OpenMP has no team behind a fork."""
    model, x = Conv(16, 16, 3).eval(), channels(1, 16, 9, 9)
    fn, wanted = compiled(model), model(x)
    fn(x)
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        os._exit(0 if torch.allclose(fn(x), wanted, rtol=1e-5, atol=1e-5) else 1)
    assert os.waitpid(child, 0)[1] == 0


@torch.no_grad()
def test_other_numbers_of_threads():
    """oneDNN makes a primitive for so many threads."""
    model, x = Conv(64, 64, 3, padding=1).eval(), torch.randn(2, 64, 28, 28).to(memory_format=LAST)
    usual, fn = torch.get_num_threads(), compiled(model)
    made = kept._primitive.cache_info().currsize
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.testing.assert_close(fn(x), model(x))
    finally:
        torch.set_num_threads(usual)
    assert kept._primitive.cache_info().currsize == made + 3


@torch.no_grad()
def test_threads_at_once():
    """Each with its own input, by one primitive of a small convolution, so they meet often."""
    _, weight, numbers, tag, arranged = a_call(channels=8, made=8)
    right = []

    def work():
        x = torch.randn(1, 8, 9, 9).to(memory_format=LAST)
        out, wanted = torch.empty(1, 8, 7, 7).to(memory_format=LAST), F.conv2d(x, weight)
        torch.set_num_threads(1)
        for _ in range(3000):
            kept.call(x, arranged, numbers, tag, out=out)
            right.append(torch.allclose(out, wanted, rtol=1e-5, atol=1e-5))

    usual = torch.get_num_threads()
    threads = [threading.Thread(target=torch.no_grad()(work)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(usual)
    assert right == [True] * 12000


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
        weight = torch.ops.ipex.kept_weight(conv.weight, 2, tag, size // 4)
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
    "empty": (Conv(8, 8, 3), channels(0, 8, 9, 9), {}),
    "off": (Conv(8, 8, 3), channels(1, 8, 9, 9), {"blocked_products": False}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", NEAR)
def test_what_is_left_to_torch(name):
    model, x, options = NEAR[name]
    fn = compiled(model.eval(), **options)
    torch.testing.assert_close(fn(x), model(x))
    assert not said()


def test_training_is_left_to_torch():
    model, x = Conv(8, 8, 3), channels(1, 8, 9, 9).requires_grad_()
    (wanted,) = torch.autograd.grad(model(x).square().sum(), x)
    (found,) = torch.autograd.grad(compiled(model)(x).square().sum(), x)
    torch.testing.assert_close(found, wanted)
    assert not said()


@torch.no_grad()
def test_inputs_with_gaps():
    """Half the channels of an image: copied first."""
    wide = channels(2, 32, 9, 9)
    check(Conv(16, 8, 3).eval(), wide[:, :16])
    assert said() == ["1 by oneDNN's primitives, kept"]


@torch.no_grad()
def test_precision_that_torch_may_lower_is_left_to_it():
    """By `set_fp32_math_mode` and torch's own switch."""
    onednn = torch.backends.mkldnn
    before = onednn.conv.fp32_precision
    onednn.conv.fp32_precision = "bf16"
    try:
        compiled(Conv(8, 8, 3).eval())(channels(1, 8, 9, 9))
    finally:
        onednn.conv.fp32_precision = before
    assert not said()


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_up_to_a_size(groups, monkeypatch):
    monkeypatch.setattr(taken, "FASTER", {(architecture(), torch.float32): taken.NOWHERE})
    compiled(Conv(16, 16, 3, groups=groups).eval())(channels(1, 16, 9, 9))
    assert not said()
    torch.compiler.reset()  # or that graph is taken for this module too
    count = 16 * 16 // groups * 9 * 49
    kind = {1: "dense", 4: "grouped", 16: "depthwise"}[groups]
    most = taken.NOWHERE._replace(**{kind: count})
    monkeypatch.setattr(taken, "FASTER", {(architecture(), torch.float32): most})
    compiled(Conv(16, 16, 3, groups=groups).eval())(channels(1, 16, 9, 9))
    assert said() == ["1 by oneDNN's primitives, kept"]


@torch.no_grad()
def test_an_addend_up_to_a_size(monkeypatch):
    inputs, size = (channels(1, 8, 9, 9), channels(1, 16, 7, 7)), 16 * 49 * 4
    for most, wanted in ((size - 1, []), (size, ["1 by oneDNN's primitives, kept"])):
        torch.compiler.reset()
        every = taken.Most(math.inf, math.inf, math.inf, most)
        monkeypatch.setattr(taken, "FASTER", {(architecture(), torch.float32): every})
        compiled(Conv(8, 16, 3, add=True).eval())(*inputs)
        assert said() == wanted


@torch.no_grad()
def test_sizes_that_vary_are_left_to_torch():
    model = Conv(8, 8, 3).eval()
    fn = torch.compile(model, backend="ipex", dynamic=True, options={"strict": True})
    x = channels(2, 8, 9, 9)
    torch.testing.assert_close(fn(x), model(x))
    assert not said()


def test_neither_cpp_nor_code_for_other_cpus_calls_them():
    assert lowering.why_not() is None
    report = decisions.open_report()
    _, by_kept = inner._why_not_ours(compat.compile_inner, True, report)
    assert by_kept() == "neither code in C++ nor for other CPUs calls them"
    assert [e.subject for e in report.events] == ["kept primitives"]


def test_a_graph_names_the_library_it_calls(monkeypatch):
    assert ("onednn", kept.installed()) in graph_files._toolkit()
    monkeypatch.setattr(graph_files, "version_of", lambda name: "")
    assert "onednn" not in dict(graph_files._toolkit())


@torch.no_grad()
def test_torchs_caches_know_the_library_and_the_threads_too(monkeypatch):
    """Where the user names a folder for them: their keys hold what the pass is identified by."""
    seen, identity = [], request.Request.identity
    monkeypatch.setattr(
        request.Request, "identity", lambda *given: seen.append(identity(*given)) or seen[-1]
    )
    model, x, usual = Conv(8, 8, 3).eval(), channels(1, 8, 9, 9), torch.get_num_threads()

    def identified():
        torch.compiler.reset()
        compiled(model)(x)
        return seen[-1]

    found = [identified(), identified()]
    try:
        torch.set_num_threads(usual + 1)
        found.append(identified())
    finally:
        torch.set_num_threads(usual)
    monkeypatch.setattr(request, "version_of", lambda name: "")
    found.append(identified())
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_an_error_of_the_library_is_typed():
    words = (3, 1, 8, 9, 9, 8, (3, 3), (99, 7), (1, 1), (0, 0), (1, 1), 3, 1, 0, 1)
    with pytest.raises(kept.KeptError, match="oneDNN"):
        kept.layout(kept.Geometry(*words))

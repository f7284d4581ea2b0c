"""Convolutions by oneDNN's kept primitives: what they compute, where they are taken, where not."""

import ctypes
import math
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipex_inductor.compiler import graph_cache, inner_compile, request
from ipex_inductor.lowerings.conv import cached_primitives as lowering
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.passes.weights import cached_primitives as taken
from ipex_inductor.passes.weights import winograd
from ipex_inductor.passes.weights.packing import onednn_dtypes
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.cpu import cached_primitives
from support.helpers import code_of

pytestmark = [
    pytest.mark.skipif(
        not cached_primitives.installed_version(), reason="onednn-cpu-gomp is not installed"
    ),
    pytest.mark.usefixtures("in_python"),  # test_cpp_wrapper.py has them in C++
]
LAST = torch.channels_last
# One rounding of sums in fp32: of some thousand terms they are 2^-20 off, of what is largest.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """On CPUs for which nobody measured, too; all that a kernel of ours might take."""
    monkeypatch.setattr(winograd, "FASTER", {})
    every = taken.Most(*[math.inf] * 4)
    monkeypatch.setattr(
        taken, "FASTER", {(architecture(), dtype): every for dtype in cached_primitives.TYPES}
    )


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
    return [reason for reason in reasons if "cached oneDNN primitives" in reason]


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


@pytest.mark.sampled
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
    assert said() == ["1 by cached oneDNN primitives"]


@torch.no_grad()
def test_the_code_calls_it_and_weights_are_arranged_once(monkeypatch):
    arranged = []
    arrange = cached_primitives.arrange
    monkeypatch.setattr(cached_primitives, "arrange", lambda *a: arranged.append(1) or arrange(*a))
    model, x = Conv(16, 32, 3).eval(), torch.randn(1, 16, 9, 9).to(memory_format=LAST)
    fn = compiled(model)
    (code,) = code_of(fn, x)
    assert "from ipex_inductor.templates.cpu.cached_primitives import call as ipex_kept" in code
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
    arranged, arrange = [], cached_primitives.arrange
    monkeypatch.setattr(cached_primitives, "arrange", lambda *a: arranged.append(1) or arrange(*a))
    model = Conv(16, 32, 3).eval()
    fn = torch.compile(model, backend="ipex", dynamic=False, options={"strict": True})
    for batch in (1, 2):
        x = channels(batch, 16, 9, 9)
        torch.testing.assert_close(fn(x), model(x))
    assert said() == ["1 by cached oneDNN primitives"] * 2
    assert len(arranged) == 1


def a_call(dtype=torch.float32, batch=1, channels=16, side=9, made=32):
    """A convolution 3x3 by a primitive: input, weight, numbers, tag, arranged weight."""
    words = (
        cached_primitives.TYPES[dtype],
        batch,
        channels,
        side,
        side,
        made,
        (3, 3),
        (side - 2, side - 2),
    )
    geometry = cached_primitives.Geometry(*words, (1, 1), (0, 0), (1, 1), 1, 0, 0)
    tag, size = cached_primitives.layout(geometry)
    numbers, weight = geometry.flat(), torch.randn(made, channels, 3, 3, dtype=dtype)
    arranged = torch.ops.ipex.kept_weight(weight, 1, tag, size // weight.element_size())
    x = torch.randn(batch, channels, side, side, dtype=dtype).to(memory_format=LAST)
    return x, weight, numbers, tag, arranged


def run(x, arranged, numbers, tag):
    return torch.ops.ipex.kept_conv(x, arranged, None, None, numbers, "none", [], tag)


def convolutions_done(capfd, work):
    """oneDNN's lines about the convolutions in `work`."""
    dnnl = ctypes.CDLL(cached_primitives.path())
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
    monkeypatch.setattr(cached_primitives, "ROOM", len(cached_primitives._met) + 1)
    model = Conv(8, 8, 3).eval()
    fn = torch.compile(model, backend="ipex", dynamic=False, options={"strict": True})
    for side in (37, 38):
        x = channels(1, 8, side, side)
        torch.testing.assert_close(fn(x), model(x))
    assert said() == ["1 by cached oneDNN primitives"]
    events = [e for report in decisions.reports() for e in report.events]
    missed = [e.reason for e in events if e.subject == "kept primitives"]
    assert missed == [f"there are {cached_primitives.ROOM} geometries in this process already"]


def test_graphs_of_the_cache_take_room_too():
    """They make primitives without having asked for a layout."""
    x, _, numbers, tag, arranged = a_call(side=23)
    cached_primitives._layout.cache_clear()
    cached_primitives._met.clear()
    run(x, arranged, numbers, tag)
    assert len(cached_primitives._met) == 1
    cached_primitives.layout(cached_primitives.Geometry.of(numbers))  # the same
    assert len(cached_primitives._met) == 1


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
    cached_primitives.call(
        moved(x), moved(arranged), tuple(numbers), "none", (), tag, out=out.zero_()
    )
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
    made = cached_primitives._primitive.cache_info().currsize
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.testing.assert_close(fn(x), model(x))
    finally:
        torch.set_num_threads(usual)
    assert cached_primitives._primitive.cache_info().currsize == made + 3


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
            cached_primitives.call(x, arranged, numbers, "none", (), tag, out=out)
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
    words = (3, 2, 16, 9, 9, 32, (3, 3), (5, 5), (2, 2), (1, 1), (1, 1), 2, 1, int(add))
    geometry, last = (
        cached_primitives.Geometry(*words),
        ("relu", []) if add else ("hardtanh", [0.0, 0.5]),
    )
    tag, size = cached_primitives.layout(geometry, *last)
    numbers = geometry.flat()
    assert cached_primitives.Geometry.of(numbers) == geometry
    wanted = torch.relu(wanted + other) if add else F.hardtanh(wanted, *last[1])
    for gone in (False, True):
        if gone:
            monkeypatch.setattr(cached_primitives, "why_not", lambda: "it is gone")
        weight = torch.ops.ipex.kept_weight(conv.weight, 2, tag, size // 4)
        made = torch.ops.ipex.kept_conv(x, weight, conv.bias, other, numbers, *last, tag)
        torch.testing.assert_close(made, wanted)


def channels(*sizes, dtype=torch.float32):
    return torch.randn(sizes, dtype=dtype).to(memory_format=LAST)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "none": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class Then(nn.Module):
    """A convolution, then whatever."""

    def __init__(self, conv, *then):
        super().__init__()
        self.conv, self.then = conv, then

    def forward(self, x):
        made = self.conv(x)
        for fn in self.then:
            made = fn(made)
        return made


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2, 32])
@pytest.mark.parametrize("word", cached_primitives.UNARY)
@pytest.mark.sampled
def test_activations_are_torchs(word, groups):
    """Of numbers small and large, and of what is none."""
    torch.manual_seed(0)
    model = Then(nn.Conv2d(32, 32, 3, 1, 1, groups=groups), ACTIVATIONS[word]).eval()
    x = channels(3, 32, 9, 9)
    x[1] *= 20
    x[2, 0, 4, 4], x[2, 0, 4, 7], x[2, 0, 7, 0] = torch.tensor([math.inf, -math.inf, math.nan])
    fn = compiled(model)
    (code,) = code_of(fn, x)
    assert said() == ["1 by cached oneDNN primitives"]
    assert f"'{word}'" in code
    found, wanted = fn(x), compiled(model, blocked_products=False)(x)
    # Both have the same kernels for it on AVX2; nobody compared those of other CPUs.
    off = 0 if architecture() == "x86-64:avx2" else CLOSE[x.dtype]
    torch.testing.assert_close(found, wanted, rtol=off, atol=20 * off, equal_nan=True)
    made = model.conv.double()(x[:2].double())
    exact, most = ACTIVATIONS[word](made), CLOSE[x.dtype] * made.abs().max()
    assert (found[:2] - exact).abs().max() <= most


@torch.no_grad()
def test_each_number_of_an_activation_has_its_primitive(op_by_op):
    slopes = [lambda x, slope=slope: F.leaky_relu(x, slope) for slope in (0.1, 0.3)]
    bounds = [lambda x, most=most: torch.clamp(x, -0.5, most) for most in (0.5, 6.0, math.inf)]
    x, conv = channels(1, 8, 9, 9), nn.Conv2d(8, 8, 3).eval()
    for fn in (*slopes, *bounds):
        torch.testing.assert_close(compiled(Then(conv, fn))(x), fn(conv(x)))
    assert said() == ["1 by cached oneDNN primitives"] * 5


def test_the_numbers_of_activations_are_onednns():
    named = ctypes.CDLL(cached_primitives.path()).dnnl_alg_kind2str
    named.restype = ctypes.c_char_p
    words = {
        word: named(int(row[0])).decode() for word, row in cached_primitives.UNARY.items() if row[0]
    }
    other = {"gelu": "gelu_erf", "hardtanh": "clip", "leaky_relu": "relu", "sigmoid": "logistic"}
    other["silu"] = "swish"
    assert words == {word: f"eltwise_{other.get(word, word)}" for word in words}


class Gated(nn.Module):
    """An inverted residual with a gate, as MobileNetV3's and EfficientNet's."""

    def __init__(self, act, gate, wide=48):
        super().__init__()
        self.act, self.gate = act, gate
        self.expand, self.project = nn.Conv2d(16, wide, 1), nn.Conv2d(wide, 16, 1)
        self.depthwise = nn.Conv2d(wide, wide, 5, 1, 2, groups=wide)
        self.squeeze, self.excite = nn.Conv2d(wide, 8, 1), nn.Conv2d(8, wide, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (wide, wide, 16))

    def forward(self, x):
        made = self.act(self.norms[0](self.expand(x)))
        made = self.act(self.norms[1](self.depthwise(made)))
        pooled = F.adaptive_avg_pool2d(made, 1)
        made = made * self.gate(self.excite(F.relu(self.squeeze(pooled))))
        return x + self.norms[2](self.project(made))


class Inverted(nn.Module):
    """MobileNetV2's."""

    def __init__(self):
        super().__init__()
        self.expand, self.project = nn.Conv2d(16, 48, 1), nn.Conv2d(48, 16, 1)
        self.depthwise = nn.Conv2d(48, 48, 3, 1, 1, groups=48)

    def forward(self, x):
        return x + self.project(F.relu6(self.depthwise(F.relu6(self.expand(x)))))


BLOCKS = {
    "MobileNetV2": (Inverted, 3, ("hardtanh", "none")),
    "MobileNetV3": (lambda: Gated(F.hardswish, F.hardsigmoid), 5, ("hardswish", "hardsigmoid")),
    "EfficientNet": (lambda: Gated(F.silu, torch.sigmoid), 5, ("silu", "sigmoid")),
}


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "MobileNetV3")) for n in BLOCKS]
)
def test_blocks_of_small_nets(name):
    torch.manual_seed(0)
    make, count, words = BLOCKS[name]
    model, x = make().eval().to(memory_format=LAST), channels(2, 16, 14, 14)
    fn = compiled(model)
    (code,) = code_of(fn, x)
    assert said() == [f"{count} by cached oneDNN primitives"]
    assert all(f"'{word}'" in code for word in words)
    assert "_convolution_pointwise" not in code
    torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_images_of_one_pixel_are_of_any_format():
    model, x = Then(nn.Conv2d(24, 8, 1).eval(), F.hardsigmoid), torch.randn(2, 24, 1, 1)
    assert x.is_contiguous()
    for given in (x, x.to(memory_format=LAST), channels(2, 24, 2, 2)[:, :, :1, 1:]):
        torch.testing.assert_close(compiled(model)(given), model(given))
    assert set(said()) == {"1 by cached oneDNN primitives"}


@torch.no_grad()
@pytest.mark.parametrize(
    "then",
    [pytest.param(F.mish, marks=pytest.mark.slow), F.elu, lambda x: torch.clamp(x, min=0.1)],
)
def test_what_onednn_does_not_fuse_comes_behind(then):
    model, x = Then(nn.Conv2d(8, 8, 3).eval(), then), channels(1, 8, 9, 9)
    fn = compiled(model)
    (code,) = code_of(fn, x)
    assert said() == ["1 by cached oneDNN primitives"]
    assert "'none'" in code
    torch.testing.assert_close(fn(x), model(x))


def test_it_has_all_activations_that_are_fused_here():
    assert {name for name, unary in UNARY.items() if unary.onednn_name} == {
        *cached_primitives.UNARY
    }


@torch.no_grad()
def test_torch_adds_into_what_a_kept_one_wrote(monkeypatch):
    """Behind a large result torch's oneDNN adds in place, whoever wrote the addend."""
    every = taken.Most(math.inf, math.inf, math.inf, 0)
    monkeypatch.setattr(taken, "FASTER", {(architecture(), torch.float32): every})

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 16, 3), nn.Conv2d(8, 16, 3)

        def forward(self, x):
            return F.relu(self.first(x) + self.second(x))

    model, x = Residual().eval(), channels(1, 8, 9, 9)
    fn = compiled(model)
    (code,) = code_of(fn, x)
    assert said() == ["1 by cached oneDNN primitives"]
    assert "_convolution_pointwise_.binary" in code
    torch.testing.assert_close(fn(x), model(x))


NEAR = {
    "contiguous": (Conv(8, 8, 3), torch.randn(1, 8, 9, 9), {"rules": "-channels-last"}),
    "a line": (nn.Conv1d(8, 8, 3), torch.randn(1, 8, 9), {}),
    "transposed": (nn.ConvTranspose2d(8, 8, 3), channels(1, 8, 9, 9), {}),
    "fp64": (Conv(8, 8, 3).double(), channels(1, 8, 9, 9, dtype=torch.float64), {}),
    "empty": (Conv(8, 8, 3), channels(0, 8, 9, 9), {}),
    "off": (Conv(8, 8, 3), channels(1, 8, 9, 9), {"blocked_products": False}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", NEAR)
@pytest.mark.sampled
def test_what_is_left_to_torch(op_by_op, name):
    model, x, options = NEAR[name]
    fn = compiled(model.eval(), **options)
    torch.testing.assert_close(fn(x), model(x))
    assert not said()


@torch.no_grad()
def test_a_model_that_is_not_channels_last_is_made_so(op_by_op):
    model, x = nn.Sequential(Conv(8, 8, 3), Conv(8, 4, 1)).eval(), torch.randn(2, 8, 9, 9)
    found, wanted = compiled(model)(x), model(x)
    assert said() == ["2 by cached oneDNN primitives"]
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()


def test_training_is_left_to_torch(op_by_op):
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
    assert said() == ["1 by cached oneDNN primitives"]


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
@pytest.mark.parametrize("groups", [1, 4, 32])
def test_up_to_a_size(op_by_op, groups, monkeypatch):
    monkeypatch.setattr(taken, "FASTER", {(architecture(), torch.float32): taken.NOWHERE})
    compiled(Conv(32, 32, 3, groups=groups).eval())(channels(1, 32, 9, 9))
    assert not said()
    torch.compiler.reset()  # or that graph is taken for this module too
    count = 32 * 32 // groups * 9 * 49
    kind = {1: "dense", 4: "grouped", 32: "depthwise"}[groups]
    most = taken.NOWHERE._replace(**{kind: count})
    monkeypatch.setattr(taken, "FASTER", {(architecture(), torch.float32): most})
    compiled(Conv(32, 32, 3, groups=groups).eval())(channels(1, 32, 9, 9))
    assert said() == ["1 by cached oneDNN primitives"]


@torch.no_grad()
def test_an_addend_up_to_a_size(op_by_op, monkeypatch):
    inputs, size = (channels(1, 8, 9, 9), channels(1, 16, 7, 7)), 16 * 49 * 4
    for most, wanted in ((size - 1, []), (size, ["1 by cached oneDNN primitives"])):
        torch.compiler.reset()
        every = taken.Most(math.inf, math.inf, math.inf, most)
        monkeypatch.setattr(taken, "FASTER", {(architecture(), torch.float32): every})
        compiled(Conv(8, 16, 3, add=True).eval())(*inputs)
        assert said() == wanted


@torch.no_grad()
def test_sizes_that_vary_are_left_to_torch(op_by_op):
    model = Conv(8, 8, 3).eval()
    fn = torch.compile(model, backend="ipex", dynamic=True, options={"strict": True})
    x = channels(2, 8, 9, 9)
    torch.testing.assert_close(fn(x), model(x))
    assert not said()


def test_neither_packages_nor_code_for_other_cpus_calls_them():
    assert lowering.why_not() is None
    report = decisions.open_report()
    _, by_kept = inner_compile._why_not_ours(True, report)
    assert by_kept() == "packages and code for other CPUs cannot call them"
    assert [e.subject for e in report.events] == ["kept primitives"]


def test_a_graph_names_the_library_it_calls(monkeypatch):
    assert ("onednn", cached_primitives.installed_version()) in graph_cache._toolkit()
    monkeypatch.setattr(graph_cache, "onednn", lambda: "")
    assert "onednn" not in dict(graph_cache._toolkit())


@torch.no_grad()
def test_torchs_caches_know_the_library_and_the_threads_too(op_by_op, monkeypatch):
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
    monkeypatch.setattr(request.graph_cache, "onednn", lambda: "")
    found.append(identified())
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_an_error_of_the_library_is_typed():
    words = (3, 1, 8, 9, 9, 8, (3, 3), (99, 7), (1, 1), (0, 0), (1, 1), 3, 1, 0)
    with pytest.raises(cached_primitives.KeptError, match="oneDNN"):
        cached_primitives.layout(cached_primitives.Geometry(*words))

"""Quantized nets compiled end to end: what is computed on integers, and with which numbers."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor import compat
from ipex_inductor.passes.quant import products
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.cpu import int8
from support.helpers import code_of
from support.int8_models import DepthwiseNet, ResNet, quantize, signal_to_noise, trained_like
from support.int8_nets import (
    PATTERNS,
    QUANTIZED,
    AllPatterns,
    Conv,
    Linear,
    Net,
    Quantize,
    QuantizeByNumbers,
    dequantized_weight,
    make_inputs,
    subject_of,
)

needs_kernels = pytest.mark.skipif(int8.why_not() is not None, reason=f"{int8.why_not()}")
pytestmark = needs_kernels
BRANCHES = range(2 * len(PATTERNS))


def _compile_nothing(gm: Any, example_inputs: Any, **_: Any) -> Callable[..., Any]:
    def call(inputs: list[Any]) -> Any:
        given = list(inputs)
        inputs.clear()
        return gm(*given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@contextmanager
def run_as_it_stands() -> Iterator[None]:
    """All of the backend but Inductor's code: ops run by their references."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "compile_inner", _compile_nothing)
        yield


def int8_events() -> dict[tuple[str, str], int]:
    """Return how often each decision about integers was made since the last test began."""
    counts: dict[tuple[str, str], int] = {}
    for event in itertools.chain(*(report.events for report in decisions.reports())):
        if event.subject.startswith("int8 "):
            key = event.kind, event.subject
            counts[key] = counts.get(key, 0) + 1
    return counts


def reasons() -> list[str]:
    """Return why products stayed in floating point."""
    events = itertools.chain(*(report.events for report in decisions.reports()))
    return [e.reason for e in events if e.subject.startswith("int8 ") and e.kind == "missed"]


def compiled(model: Any, rules: str = "", **words: Any) -> Any:
    options = {"strict": True, **({"rules": rules} if rules else {})}
    return torch.compile(model, backend="ipex", options=options, **words)


# All patterns


@dataclass
class Outcome:
    """What compiling `AllPatterns` gave: results, counts, and the nets' own results."""

    bf16: bool
    model: AllPatterns
    calls: list[tuple[tuple[Tensor, ...], list[Tensor], list[Tensor], list[Tensor]]]
    events: dict[tuple[str, str], int]
    graphs: int


# bf16, a dynamic batch, and whether Inductor generates code.
MODES = {
    "fp32": (False, False, False),
    "bf16": (True, False, False),
    "fp32 dynamic": (False, True, False),
    "bf16 dynamic": (True, True, False),
    "fp32 in code": (False, False, True),
    "bf16 dynamic in code": (True, True, True),
}
QUICK = ("fp32", "bf16 dynamic")  # the others take ten seconds each, in code half a minute
PARAMS = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODES]


@pytest.fixture(scope="module", params=PARAMS)
def outcome(request: pytest.FixtureRequest) -> Outcome:
    """The net compiled once, by Inductor's code or as the graph stands.

    It is called twice, with another batch where that is dynamic, else with other weights and
    scales, changed in place.
    """
    bf16, dynamic, in_code = MODES[request.param]
    torch.compiler.reset()
    decisions.clear()
    torch.manual_seed(0)
    model, calls = AllPatterns().eval(), []
    with nullcontext() if in_code else run_as_it_stands(), torch.no_grad():
        run = compiled(model)
        for batch in (2, 5 if dynamic else 2):
            inputs = make_inputs(batch, bf16)
            if dynamic:
                for value in inputs:
                    torch._dynamo.mark_dynamic(value, 0)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                results, eager = run(*inputs), model(*inputs)
            plain = [value.float() for value in inputs]
            exact = model(*plain)
            values = [
                branch.product(*(plain[:2] if branch.pattern.is_conv else plain[2:]))
                for branch in model.branches
            ]
            scales = [branch.result.scale.item() for branch in model.branches]
            calls.append((values, results, eager, exact, scales))
            if not dynamic:
                change_in_place(model)
    events, graphs = int8_events(), len(decisions.reports())
    torch.compiler.reset()
    return Outcome(bf16, model, calls, events, graphs)


def change_in_place(model: AllPatterns) -> None:
    """Other weights, scales and zero points in the same memory."""
    for branch in model.branches:
        branch.layer.weight.mul_(0.7).add_(0.01)
        branch.input.scale.mul_(1.1)
        branch.result.scale.mul_(1.3)
        if branch.input.words[2] == torch.uint8:
            branch.input.zero_point.sub_(9)


def test_each_pattern_fires_as_counted(outcome: Outcome) -> None:
    """Once for each branch of the net, and nothing else; one graph for all calls."""
    expected: dict[tuple[str, str], int] = {}
    for branch in outcome.model.branches:
        subject = subject_of(branch.pattern, branch.quantized, outcome.bf16)
        expected["fired", subject] = expected.get(("fired", subject), 0) + 1
    assert outcome.events == expected
    assert outcome.graphs == 1


@pytest.mark.parametrize("number", BRANCHES)
def test_each_pattern_is_the_reference(outcome: Outcome, number: int) -> None:
    """Within one step, where values are ties; before and after weights and scales changed."""
    branch = outcome.model.branches[number]
    for values, results, eager, exact, scales in outcome.calls:
        result, scale = results[number], scales[number]
        assert result.dtype == eager[number].dtype
        assert result.stride() == eager[number].stride()
        if branch.quantized:
            # bf16 too: the kernel rounds once, behind the activation, as the net does in fp32. But
            # autocast rounds biases of up to 1/3, by 2^-10, and addends, of up to 4, by 2^-7; of
            # sums outside of the kernel products too. A step is 0.02 and more.
            steps = values[number].double() / scale
            apart = ((result - exact[number]) / scale).round().abs()
            limit = (0.45 if branch.pattern.addend else 0.06) if outcome.bf16 else 2e-3
            assert apart.max() <= 1
            ties = (steps - steps.floor() - 0.5).abs()[apart > 0]
            # fp32 sums and activations are within 1e-5 of values of up to 5.
            assert (ties < limit).all(), ties
        else:
            # fp32: sums in another order, and activations. bf16: roundings of the result, of
            # biases and addends, of a product that was added outside too.
            rtol, atol = (
                (2**-7, 2**-7 if branch.pattern.addend else 2**-10)
                if outcome.bf16
                else ((1e-5, 2e-5))
            )
            difference = (result.float() - exact[number]).abs()
            assert (difference <= rtol * exact[number].abs() + atol).all(), difference.max()


# Generated code


class SmallNet(nn.Module):
    """A convolution, a max pool, a residual sum and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = _conv(3), _conv(8), Linear(384, 24)
        self.inputs = nn.ModuleList(Quantize(0.02, zero_point) for zero_point in (115, 0, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs[1](F.relu(self.first(self.inputs[0](x))))
        x = F.max_pool2d(x, 2)
        x = self.inputs[2](F.relu(self.second(x) + x))
        return self.last(x.flatten(1))


def _conv(channels: int) -> Conv:
    return Conv(channels, 8, 3, padding=1)


@torch.no_grad()
def test_generated_code_follows_sizes_weights_and_scales() -> None:
    """One compilation for batches of any size, and weights and scales that change in place."""
    model = SmallNet().eval()
    run = compiled(model)
    for batch in (2, 5, 3):
        x = torch.randn(batch, 3, 12, 16)
        torch._dynamo.mark_dynamic(x, 0)
        result, expected = run(x), model(x)
        # A tie of a quantization moves sums by a step of 0.03 at most times a weight of up to 0.2;
        # one in ten thousand values is a tie, up to the rounding of fp32.
        assert (result - expected).abs().max() < 0.02
        assert signal_to_noise(expected, result) > 60
        assert result.stride() == expected.stride()
        model.first.weight.mul_(0.8)
        model.second.bias.add_(0.1)
        model.last.weight.add_(0.05)
        model.inputs[0].scale.mul_(1.2)
        model.inputs[0].zero_point.add_(7)
        model.inputs[2].scale.mul_(1.1)
    assert len(decisions.reports()) == 1
    assert int8_events() == {
        ("fired", "int8 conv+relu+quantize"): 1,
        ("fired", "int8 conv+add+relu+quantize"): 1,
        ("fired", "int8 linear"): 1,
    }


LOAD = """
import json, sys, torch
launched = []
def watch(event, args):
    if event == "subprocess.Popen" and any(str(a).endswith((".cpp", ".h")) for a in args[1]):
        launched.append([str(a) for a in args[1]])
sys.addaudithook(watch)
from ipex_inductor.reporting import decisions
from support.int8_nets import Conv, Linear, Net, Quantize
torch.manual_seed(int(sys.argv[1]))
model = Net(lambda q, c, x: c(q(x)), Quantize(0.02, 115), Linear(40, 24)).eval()
x = torch.randn(6, 40)
with torch.no_grad():
    result = torch.compile(model, backend="ipex", options={"strict": True})(x)
    error = (result - model(x)).abs().max().item()
events = [e for report in decisions.reports() for e in report.events]
print(json.dumps({
    "cache": [e.subject for e in events if e.kind == "cache"],
    "fired": [e.subject for e in events if e.kind == "fired"],
    "built": launched, "error": error,
}))
"""


@pytest.mark.slow  # half a minute
def test_another_process_loads_what_was_compiled(tmp_path: Path) -> None:
    """With other weights: the graph and the kernels come from the cache, and no compiler runs."""
    tests = Path(__file__).parents[2]
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    unset = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    env = {k: v for k, v in os.environ.items() if k not in unset}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "IPEX_HOME": str(tmp_path / "home")}
    env |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    env |= {"TMPDIR": str(tmp_path)}
    results = []
    for seed in "0", "1":
        command = [sys.executable, "-c", LOAD, seed]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = results
    # Inductor ignores the bounds of a quantization by tensors, which is corrected.
    assert first["fired"] == second["fired"] == ["int8 linear", "quantize_per_tensor"]
    assert first["built"]
    assert not second["built"]
    assert second["cache"] == ["hit"]
    assert first["cache"] != second["cache"]
    assert all(result["error"] < 1e-5 for result in results)  # sums in fp32


# Nets of the frontend


@pytest.mark.sampled("resnet-bf16", "depthwise-fp32")
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("make", "fired"),
    [
        (
            ResNet,
            {
                "int8 conv+relu+quantize": 3,
                "int8 conv+add+relu+quantize": 2,
                "int8 conv+quantize": 1,
                "int8 linear": 1,
            },
        ),
        (DepthwiseNet, {}),
    ],
    ids=["resnet", "depthwise"],
)
def test_converted_nets(make: Any, fired: dict[str, int], bf16: bool) -> None:
    model = quantize(trained_like(make(), 3, 32, 32), (torch.randn(4, 3, 32, 32),))
    x = torch.randn(3, 3, 32, 32)
    layers = sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in make().modules())
    with run_as_it_stands(), torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            result, eager = compiled(model)(x), model(x)
        exact = model(x)
    counts = {subject: n for (kind, subject), n in int8_events().items() if kind == "fired"}
    assert sum(counts.values()) == layers, (counts, reasons())
    assert not fired or bf16 or counts == fired
    assert (result.dtype, result.stride()) == (eager.dtype, eager.stride())
    # Ties move one of some hundred inputs of a sum by a step of 1/255; bf16 rounds floats between.
    assert signal_to_noise(exact, result.float()) > (30 if bf16 else 50)


# What must not be computed on integers, or not as a whole


def image(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 8, 9, 10))


def _zero_point(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, dequantized_weight(weight, zero_point=3))


def make_q(scale: float = 0.025, zero_point: int = 117) -> Quantize:
    return Quantize(scale, zero_point)


SMALL = [image(8, 8, 3, 3) / 8]
# Modules, function, further inputs; what fires, and part of the reason of what does not.
MISSES: dict[str, tuple[Callable[[], nn.Module], list[Tensor], list[str], str]] = {
    "weight with a zero point, which is no miss": (
        lambda: Net(lambda q, x, w: _zero_point(q(x), w), make_q()),
        SMALL,
        ["int8 conv"],
        "",
    ),
    "scales of another axis": (
        lambda: Net(lambda q, x, w: F.conv2d(q(x), dequantized_weight(w, axis=1)), make_q()),
        SMALL,
        [],
        "no scale of each output",
    ),
    "transposed convolution": (
        lambda: Net(
            lambda q, x, w: F.conv_transpose2d(q(x), dequantized_weight(w, axis=1)), make_q()
        ),
        SMALL,
        ["int8 conv"],
        "",
    ),
    "activation without kernel": (
        lambda: Net(lambda q, c, x: torch.log(c(q(x)) + 9), make_q(), Conv(8, 4, 3)),
        [],
        ["int8 conv"],
        "",
    ),
    "log alone": (
        lambda: Net(lambda q, c, x: torch.log(c(q(x))), make_q(), _positive(Conv(8, 4, 3))),
        [],
        [],
        "kernels have no conv+log",
    ),
    "addend of another shape": (
        lambda: Net(lambda q, c, x, o: c(q(x)) + o, make_q(), Conv(8, 4, 3)),
        [image(1, 4, 1, 1)],
        ["int8 conv"],
        "",
    ),
    "layer with another reader": (
        lambda: Net(
            lambda q, c, r, x: (lambda v: (r(v), v.sin()))(c(q(x))),
            make_q(),
            Conv(8, 4, 3),
            make_q(0.02),
        ),
        [],
        ["int8 conv"],
        "",
    ),
    "result with two quantizations": (
        lambda: Net(
            lambda q, c, r, s, x: (lambda v: (r(v), s(v)))(c(q(x))),
            make_q(),
            Conv(8, 4, 3),
            make_q(0.02),
            make_q(0.04, 99),
        ),
        [],
        ["int8 conv"],
        "",
    ),
    "input also read as floats": (
        lambda: Net(lambda q, c, x: (lambda v: (c(v), v.cos()))(q(x)), make_q(), Conv(8, 4, 3)),
        [],
        ["int8 conv"],
        "",
    ),
    "weight that is an input": (
        lambda: Net(lambda q, x, w: F.conv2d(q(x), dequantized_weight(w)), make_q()),
        SMALL,
        ["int8 conv"],
        "",
    ),
    "float weight": (
        lambda: Net(lambda q, c, x: c(q(x)), make_q(), nn.Conv2d(8, 4, 3)),
        [],
        [],
        "",
    ),
    "float input": (lambda: Net(lambda c, x: c(x), Conv(8, 4, 3)), [], [], ""),
    "one dimension": (
        lambda: Net(
            lambda q, x, w: F.conv1d(q(x[:, :, 0]), dequantized_weight(w[..., 0])), make_q()
        ),
        SMALL,
        ["int8 conv"],
        "",
    ),
    "max pool without batch": (
        lambda: Net(lambda q, c, x: c(F.max_pool2d(q(x)[0], 2)[None]), make_q(), Conv(8, 4, 3)),
        [],
        [],
        "",
    ),
    "scale computed from the input": (
        lambda: Net(_quantize_by_range, Conv(8, 4, 3)),
        [],
        ["int8 conv"],
        "",
    ),
    "scale as a number": (
        lambda: Net(
            lambda q, c, r, x: r(c(q(x))),
            QuantizeByNumbers(0.025, 117),
            Conv(8, 4, 3),
            QuantizeByNumbers(0.02, 99),
        ),
        [],
        ["int8 conv+quantize"],
        "",
    ),
    "narrow range": (
        lambda: Net(_quantize_to_seven_bits, make_q(), Conv(8, 4, 3)),
        [],
        ["int8 conv+quantize"],
        "",
    ),
    "one scale of the weight": (
        lambda: Net(_convolve_with_one_scale, make_q()),
        SMALL,
        ["int8 conv"],
        "",
    ),
    "views between": (
        lambda: Net(
            lambda q, c, x: c(q(x).flatten(1).view(2, 4, 18, 10)[:, :, ::2]),
            make_q(),
            Conv(4, 4, 3),
        ),
        [],
        ["int8 conv"],
        "",
    ),
    "moves before the quantization": (
        lambda: Net(
            lambda q, c, r, x: r(c(q(x)).permute(0, 2, 3, 1)),
            make_q(),
            Conv(8, 4, 3),
            make_q(0.02),
        ),
        [],
        ["int8 conv+quantize"],
        "",
    ),
}


MISSES |= {
    "products of activations": (
        lambda: Net(
            lambda q, r, s, x: s(q(x[:, 0]) @ r(x[:, 1]).transpose(1, 2) / 2.5),
            make_q(),
            make_q(0.03),
            make_q(0.08),
        ),
        [],
        ["int8 bmm+div+quantize"],
        "",
    ),
    "product of an activation and floats": (
        lambda: Net(lambda q, x: q(x[:, 0]) @ x[:, 1].transpose(1, 2), make_q()),
        [],
        [],
        "",
    ),
    "transposed weight": (
        lambda: Net(
            lambda q, c, x: q(x).flatten(0, 2) @ dequantized_weight(c.weight, axis=1),
            make_q(),
            nn.Linear(7, 10),
        ),
        [],
        ["int8 linear"],
        "",
    ),
    "rows with scales": (
        lambda: Net(_quantize_rows, Linear(10, 7)),
        [],
        ["int8 linear"],
        "",
    ),
    "pool of rows with scales": (
        lambda: Net(lambda c, x: _quantize_rows(lambda v: c(F.max_pool2d(v, 2)), x), Linear(5, 7)),
        [],
        [],
        "",
    ),
}


def _quantize_rows(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """As dynamic quantization by rows does."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    words = scale, torch.zeros_like(scale, dtype=torch.int64), -128, 127, torch.int8
    integers = QUANTIZED.quantize_per_token.default(x, *words)
    return layer(QUANTIZED.dequantize_per_token.default(integers, *words, torch.float32))


def _positive(layer: nn.Module) -> nn.Module:
    layer.bias.data.fill_(9.0)  # type: ignore[union-attr]
    return layer


def _quantize_by_range(conv: nn.Module, x: Tensor) -> Tensor:
    """As dynamic quantization does."""
    scale = x.abs().amax() / 127
    words = scale, torch.zeros((), dtype=torch.int64), -128, 127, torch.int8
    integers = QUANTIZED.quantize_per_tensor.tensor(x, *words)
    return conv(QUANTIZED.dequantize_per_tensor.tensor(integers, *words))


def _quantize_to_seven_bits(q: nn.Module, conv: nn.Module, x: Tensor) -> Tensor:
    words = 0.03, 60, 0, 127, torch.uint8
    integers = QUANTIZED.quantize_per_tensor.default(conv(q(x)), *words)
    return QUANTIZED.dequantize_per_tensor.default(integers, *words)


def _convolve_with_one_scale(q: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    words = 0.004, 0, -128, 127, torch.int8
    integers = QUANTIZED.quantize_per_tensor.default(weight, *words)
    return F.conv2d(q(x), QUANTIZED.dequantize_per_tensor.default(integers, *words))


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_right(name: str) -> None:
    """They fire as the table says, and have the numbers of the net: within a step of 0.04."""
    make, others, fired, reason = MISSES[name]
    model, x = make().eval(), image()
    with run_as_it_stands(), torch.no_grad():
        expected, results = model(x, *others), compiled(model)(x, *others)
    assert [s for (kind, s), n in int8_events().items() for _ in range(n) if kind == "fired"] == (
        fired
    )
    assert any(reason in text for text in reasons()) if reason else not reasons()
    if not isinstance(expected, tuple):
        expected, results = (expected,), (results,)
    for value, result in zip(expected, results, strict=True):
        assert result.stride() == value.stride()
        is_close = torch.isclose(result, value, rtol=1e-5, atol=2e-5)
        # Ties of quantized results, one of a thousand at most, are a step apart.
        assert (~is_close).float().mean() < 1e-3
        assert (result - value).abs().max() < 0.041


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_floats_stay(dtype: torch.dtype) -> None:
    """Dequantized to fp64 or fp16: torch computes these."""

    def dequantize(x: Tensor) -> Tensor:
        words = 0.025, 117, 0, 255, torch.uint8
        integers = QUANTIZED.quantize_per_tensor.default(x, *words)
        return QUANTIZED.dequantize_per_tensor.default(integers, *words, out_dtype=dtype)

    x, weight = torch.randn(4, 40), torch.randn(24, 40) / 6

    def model(x: Tensor) -> Tensor:
        return F.linear(dequantize(x), dequantized_weight(weight).to(dtype))

    with run_as_it_stands(), torch.no_grad():
        result = compiled(model)(x)
    assert {kind for kind, _ in int8_events()} <= {"missed"}
    # The same products, in an order of their own: one rounding of fp16 is 2^-11.
    torch.testing.assert_close(result, model(x), rtol=2**-10, atol=1e-3)


def test_training_graphs_stay() -> None:
    model = Net(lambda c, x: c(x), nn.Conv2d(8, 4, 3))
    q = make_q()
    with run_as_it_stands():
        result = compiled(lambda x: model(x) + q(x).sum())(image())
    assert result.requires_grad
    assert not int8_events()


# Switches and reasons


def linear_net() -> nn.Module:
    return Net(lambda q, layer, x: layer(q(x)), make_q(), Linear(40, 24)).eval()


def test_a_rule_switches_it_off() -> None:
    model, x = linear_net(), torch.randn(6, 40)
    with run_as_it_stands(), torch.no_grad():
        result = compiled(model, rules="-int8")(x)
        assert not int8_events()
        compiled(model, rules="-linear+relu")(x)
        assert int8_events() == {("fired", "int8 linear"): 1}
        torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)  # sums in fp32


def test_a_missing_library_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "why_not", lambda: "no C++ compiler was found")
    model, x = linear_net(), torch.randn(6, 40)
    with run_as_it_stands(), torch.no_grad():
        result = compiled(model)(x)
        assert int8_events() == {("missed", "int8 linear"): 1}
        assert reasons() == ["no C++ compiler was found"]
        torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)  # sums in fp32


def test_a_gpu_is_a_reason() -> None:
    """A graph with values of another device, which no kernel runs on."""

    def trace(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        words = 0.025, 117, 0, 255, torch.uint8
        integers = QUANTIZED.quantize_per_tensor.default(x, *words)
        x = QUANTIZED.dequantize_per_tensor.default(integers, *words)
        zeros = torch.zeros_like(scale, dtype=torch.int64)
        words = scale, zeros, 0, -128, 127, torch.int8
        weight = QUANTIZED.dequantize_per_channel.default(weight, *words)
        return torch.mm(x, weight.permute(1, 0))

    with FakeTensorMode():
        x, scale = torch.empty(4, 40, device="xpu"), torch.empty(24, device="xpu")
        weight = torch.empty(24, 40, dtype=torch.int8, device="xpu")
        module = make_fx(trace)(x, weight, scale)
        report = decisions.GraphReport()
        assert products.quantize_products(module.graph, report, lambda device: None) == 0
    (event,) = report.events
    assert (event.kind, event.subject) == ("missed", "int8 linear")
    assert "xpu" in event.reason


def test_plain_inductor_is_unchanged(in_python: None) -> None:
    """The same code before this backend compiled a quantized net, and afterwards."""
    model, x = linear_net(), torch.randn(6, 40)

    def code() -> list[str]:
        torch.compiler.reset()
        return code_of(torch.compile(model, backend="inductor"), x)

    with torch.no_grad():
        before = code()
        torch.compiler.reset()
        with run_as_it_stands():
            compiled(model)(x)
        assert int8_events() == {("fired", "int8 linear"): 1}
        assert code() == before


def test_no_branch_is_left_out() -> None:
    """The patterns of the original documentation but for products of two activations."""
    names = {pattern.name for pattern in PATTERNS}
    layers = {"conv", "conv+relu", "conv+add", "conv+add+relu", "conv pooled"}
    layers |= {"linear", "linear+relu", "linear+gelu", "linear+sigmoid", "linear+add"}
    assert layers <= names

"""Quantized programs: the 23 INT8 patterns among other pieces, held against eager in fp32.

The fp64 twin cannot run `quantize_per_tensor`. Roundings of fp32 sums differ only where a value is
a tie, so integers are equal elsewhere, and at most one step apart there.
"""

import itertools
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from fuzz import twin
from fuzz.builder import Builder
from fuzz.campaign import Failure, Tally, _message, _subjects
from fuzz.program import NAMES, Program
from fuzz.quantized_names import recorded_ties
from fuzz.twin import Mismatch, describe
from ipex_inductor.passes import joint
from ipex_inductor.passes.pass_context import NOT_CALLED, PassSettings
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import GraphReport

FOLLOWERS = {
    "conv": ("", "relu", "sum", "sum+relu"),
    "linear": ("", "relu", "gelu", "sigmoid", "sum"),
    "bmm": ("", "div"),
}
# Table 1.3 of INT8 patterns: each with a result in fp32 and in int8, and the pool between integers.
PATTERNS = [
    *((layer, follow, out) for layer, row in FOLLOWERS.items() for follow in row for out in (0, 1)),
    ("max_pool", "", 1),
]
MORE = ("conv_transpose", "conv1d", "embedding_bag", "depthwise", "conv3d")  # other pieces
# Floats behind a product differ from eager's by roundings of sums of some 200 products.
FLOATS = {"rtol": 1e-4, "atol": 1e-4}
BEHIND_TIES = 0.05  # of the largest: a step of 1/255 times a weight, for each of a few ties


class QuantizedBuilder(Builder):
    """Grows a program in fp32, whose scales fit the values that are rounded."""

    def leaf(self, letter: str, kind: str, shape: Any, **fill: Any) -> str:
        name = super().leaf(letter, kind, shape, **fill)
        value = self.env[name]
        self.env[name] = value.float() if value.is_floating_point() else value
        return name

    def evaluate(self, line: str) -> torch.Tensor:
        """Return the value of an expression in fp32."""
        with torch.no_grad():
            return eval(line, {**NAMES, **self.env})

    def rounded(self, name: str) -> str:
        """Append the rounding of a value to 8 bits."""
        value, dtype = self.env[name], self.pick("uint8", "uint8", "int8")
        low, high = min(value.min().item(), 0.0), max(value.max().item(), 0.0)
        share = self.pick(0.7, 1.0, 1.3)  # below 1 values are saturated
        if dtype == "int8":
            scale, zero_point = max(high, -low, 1e-3) / 127 * share, self.pick(0, 0, -5)
        else:
            scale = max(high - low, 1e-3) / 255 * share
            zero_point = min(max(round(-low / scale), 0), 255)
        word = self.pick("q", "qt")
        return self.emit(f"{word}({name}, {scale:.5g}, {zero_point}, '{dtype}')")


def generate(seed: int) -> Program:
    """Return the quantized program number `seed`: a pattern of the table, and other pieces."""
    for attempt in itertools.count():
        with suppress(RuntimeError):
            return _draw(seed, random.Random(f"quantized {seed}.{attempt}"))
    raise AssertionError("itertools.count ended")


def _draw(seed: int, rng: random.Random) -> Program:
    b = QuantizedBuilder(rng, "float32")
    layer, follow, out = PATTERNS[seed % len(PATTERNS)]
    b.tag(f"pattern: {layer}, {follow}, {out}")
    values = [_pattern(b, layer, follow, bool(out))]
    while rng.random() < 0.4:
        values.append(_piece(b))
    for name in values[:]:
        if b.chance(0.15):  # a second reader
            values.append(b.emit(f"torch.cos({name})"))
    return b.program(values, "float32")


def _piece(b: QuantizedBuilder) -> str:
    if b.chance(0.5):
        layer, follow, out = b.rng.choice(PATTERNS)
        return _pattern(b, layer, follow, bool(out))
    return _product(b, b.pick(*MORE))


def _pattern(b: QuantizedBuilder, layer: str, follow: str, out: bool) -> str:
    """Append a layer, what follows it, and the rounding of the result."""
    value = _product(b, layer)
    for word in filter(None, follow.split("+")):
        value = _follow(b, value, word)
    return _after(b, b.rounded(value)) if out else value


def _follow(b: QuantizedBuilder, value: str, word: str) -> str:
    if word == "sum":
        other = b.input(*b.shape(value))
        other = b.rounded(other) if b.chance(0.5) else other
        pair = [value, other] if b.chance(0.5) else [other, value]
        return b.emit(" + ".join(pair))
    lines = {
        "relu": "torch.relu({})",
        "gelu": f"F.gelu({{}}, approximate='{b.pick('none', 'tanh')}')",
        "sigmoid": "torch.sigmoid({})",
        "div": f"{{}} / {b.pick(2.0, 2.83, 8)}",
    }
    return b.emit(lines[word].format(value))


def _after(b: QuantizedBuilder, value: str) -> str:
    """Append what is exact on integers, or another layer that reads them, now and then."""
    if b.chance(0.3) and b.dim(value) == 4:
        value = b.emit(
            b.pick("F.max_pool2d({}, 2)", "torch.relu({})", "{}.flatten(2)").format(value)
        )
    if b.chance(0.3) and b.dim(value) >= 2:
        features = b.shape(value)[-1]
        weight = b.parameter(b.pick(3, 8), features)
        return b.rounded(b.emit(f"F.linear({value}, qw({weight}, 0))"))
    return value


def _product(b: QuantizedBuilder, layer: str) -> str:
    return PRODUCTS[layer](b)


def _image(b: QuantizedBuilder, channels: int, dims: int = 2) -> str:
    """Append a rounded image."""
    sizes = [b.pick(4, 5, 7) for _ in range(dims)]
    return b.rounded(b.input(b.pick(1, 2), channels, *sizes))


def _conv(b: QuantizedBuilder, x: str = "", dims: int = 2, groups: int = 1, outs: int = 0) -> str:
    channels = b.pick(3, 4, 8) if not x else b.shape(x)[1]
    groups = groups or channels
    x = x or _image(b, channels, dims)
    outs = outs or groups * b.pick(1, 2, 5)
    taps = [b.pick(1, 2, 3) for _ in range(dims)]
    weight = b.parameter(outs, channels // groups, *taps)
    bias = b.parameter(outs) if b.chance(0.7) else None
    stride, padding, dilation = b.pick(1, 1, 2), b.pick(0, 1), b.pick(1, 1, 2)
    words = f"{stride}, {padding}, {dilation}, {groups}"
    return b.emit(f"F.conv{dims}d({x}, qw({weight}, 0), {bias}, {words})")


def _transposed(b: QuantizedBuilder) -> str:
    groups, channels = b.pick(1, 1, 2), 4
    x = _image(b, channels)
    taps, stride = [b.pick(1, 2, 3, 4) for _ in range(2)], b.pick(1, 2, 3)
    outs = b.pick(2, 3)
    weight, bias = b.parameter(channels, outs, *taps), b.parameter(outs * groups)
    words = f"{stride}, {b.pick(0, 1)}, {b.rng.randrange(stride)}, {groups}"
    line = b.emit(f"F.conv_transpose2d({x}, qw({weight}, 1), {bias}, {words})")
    return b.rounded(line) if b.chance(0.5) else line


def _linear(b: QuantizedBuilder) -> str:
    features = b.pick(5, 16, 33)
    x = b.rounded(b.input(*b.pick((4,), (2, 3), (1,), ()), features))
    if b.dim(x) == 2 and b.chance(0.2):
        x = b.emit(f"{x}.view(1, *{x}.shape)")
    weight = b.parameter(b.pick(1, 4, 24), features)
    bias = b.parameter(b.shape(weight)[0]) if b.chance(0.7) else None
    return b.emit(f"F.linear({x}, qw({weight}, 0), {bias})")


def _bmm(b: QuantizedBuilder) -> str:
    batch, m, k, n = b.pick(1, 3), b.pick(1, 4), b.pick(5, 16), b.pick(2, 7)
    first = b.rounded(b.input(batch, m, k))
    if b.chance(0.5):
        return b.emit(f"torch.bmm({first}, {b.rounded(b.input(batch, k, n))})")
    second = b.rounded(b.input(batch, n, k))
    return b.emit(f"torch.matmul({first}, {second}.transpose(-1, -2))")


def _pool(b: QuantizedBuilder) -> str:
    pooled = b.emit(f"F.max_pool2d({_image(b, 4)}, {b.pick(2, 3)}, {b.pick(1, 2)}, 1)")
    return _conv(b, pooled)


def _bag(b: QuantizedBuilder) -> str:
    table = b.parameter(10, 6)
    indices = b.input(3, 4, fill="index", scale=10)
    return b.emit(f"F.embedding_bag({indices}, qw({table}, 0), mode='{b.pick('sum', 'mean')}')")


PRODUCTS = {
    "conv": lambda b: _conv(b, groups=b.pick(1, 1, 1, 0)),
    "linear": _linear,
    "bmm": _bmm,
    "max_pool": _pool,
    "conv_transpose": _transposed,
    "conv1d": lambda b: _conv(b, dims=1),
    "conv3d": lambda b: _conv(b, dims=3),
    "depthwise": lambda b: _conv(b, groups=0),
    "embedding_bag": _bag,
}


# Judging


def judge(program: Program, in_code: bool = False) -> list[Any]:
    """Compile a program and compare it with eager; return the decisions.

    Args:
        program: the program.
        in_code: run Inductor's code and our kernels, in place of the references of ops.

    Raises:
        Mismatch: where integers differ but for ties, or floats by more than rounding.
    """
    module, inputs = program.module(torch.float32), program.inputs(torch.float32)
    run = _compile if in_code else _rewrite
    with torch.no_grad():
        results, events = run(program, [value.clone() for value in inputs])
        with recorded_ties(inputs) as ties:
            expected = module(*inputs)
    _compare(program, results, expected, any(bool(tie.any()) for tie in ties))
    return events


def _rewrite(program: Program, inputs: list[torch.Tensor]) -> tuple[Sequence[Any], list[Any]]:
    """Return the results of the rewritten graph, whose ops run by their references."""
    captured, report = twin.capture(program, False), GraphReport()
    gm = captured.copy()
    settings = PassSettings(why_not_quantized=NOT_CALLED | {"int8": lambda *_, **__: None})
    with captured.compiling():
        joint.JointPass("", settings, report, [])(gm.graph)
    gm.recompile()
    module = program.module(torch.float32)
    return gm(*module.parameters(), *module.buffers(), *inputs), report.events


def _compile(program: Program, inputs: list[torch.Tensor]) -> tuple[Sequence[Any], list[Any]]:
    """Return the results of Inductor's code, which calls our kernels."""
    torch.compiler.reset()
    decisions.clear()
    module = program.module(torch.float32)
    results = torch.compile(module, backend="ipex", options={"strict": True})(*inputs)
    return results, [event for report in decisions.reports() for event in report.events]


def _compare(program: Program, results: Any, expected: Any, has_ties: bool) -> None:
    steps = dict(program.steps)
    for name, result, value in zip(program.outputs, results, expected, strict=True):
        line = steps[name]
        if describe(result) != describe(value):
            raise Mismatch(f"{name} = {line}: {describe(result)}, not {describe(value)}")
        off = (result - value).abs()
        close = FLOATS["atol"] + FLOATS["rtol"] * value.abs()
        if not has_ties:
            if bool((off > close).any()):
                raise Mismatch(f"{name} = {line}: off by {off.max().item():.2e} without a tie")
        elif line.startswith(("q(", "qt(")):
            scale = float(line.split(", ")[1])
            if bool((off > 1.01 * scale).any()):
                raise Mismatch(f"{name} = {line}: {off.max().item() / scale:.1f} steps apart")
        elif off.numel() and off.max() > BEHIND_TIES * value.abs().max():
            raise Mismatch(f"{name} = {line}: off by {off.max().item():.2e} behind a tie")


def fails(program: Program) -> bool:
    """Return whether a program is still wrong; one that eager refuses is not."""
    try:
        judge(program)
    except Mismatch:
        return True
    except Exception:
        return False
    return False


def judge_seeds(seeds: Iterable[int], in_code: bool = False) -> Tally:
    """Judge the quantized programs of `seeds`."""
    tally, began = Tally(), time.process_time()
    for seed in seeds:
        program = generate(seed)
        tally.programs += 1
        tally.tags.update(set(program.tags))
        try:
            events = judge(program, in_code)
        except Exception as error:
            tally.failures.append(Failure(seed, _message(error), program))
            continue
        tally.fired.update(_subjects(events, "fired"))
        tally.missed.update(_subjects(events, "missed"))
    tally.cpu = time.process_time() - began
    return tally


def judge_seeds_in_code(seeds: Iterable[int]) -> Tally:
    """Judge the quantized programs of `seeds` by Inductor's code and our kernels."""
    return judge_seeds(seeds, in_code=True)

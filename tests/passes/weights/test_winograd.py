"""Convolutions by Winograd's way: what they compute, where they are chosen, and where not."""

import copy
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipex_inductor
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.ops.conv.winograd import PANEL
from ipex_inductor.passes.weights import prologue
from ipex_inductor.passes.weights import winograd as choice
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import current
from ipex_inductor.templates.cpu import cpu_library, winograd
from ipex_inductor.templates.cpu.blocked import UNARY as WORDS

LAST = torch.channels_last
HERE = current("cpu").arch
ROW = HERE, torch.float32
DTYPES = [torch.float32, torch.bfloat16]
CHOSEN = [dtype for dtype in DTYPES if (HERE, dtype) in choice.FASTER] or DTYPES[:1]
needs_library = pytest.mark.skipif(
    cpu_library.why_not() is not None, reason=f"{cpu_library.why_not()}"
)
needs_row = pytest.mark.skipif(
    ROW not in choice.FASTER or cpu_library.why_not() is not None,
    reason="oneDNN's convolutions are kept here",
)
# Sums of some hundred terms in fp32, a few units of 2^-24; GELU's formula has 1.5e-7 of its own.
# bf16 is rounded once, to 2^-9.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3}
LIMIT = LIMITS[torch.float32]


def relative(result: Tensor, truth: Tensor) -> float:
    """Distance of `result` from `truth`, as a share of its size."""
    return float((result.double() - truth).norm() / truth.norm())


def case(
    channels: int,
    made: int,
    sides: tuple[int, int],
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias."""
    torch.manual_seed(0)
    x = torch.randn(batch, channels, *sides).relu_().to(dtype, memory_format=LAST)
    weight = torch.randn(made, channels, 3, 3) / (9 * channels) ** 0.5
    return x, weight.to(dtype), torch.randn(made).to(dtype)


def called(
    x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, padding, unary: str
) -> Tensor:
    """The kernel's result, in memory that was all NaN."""
    sides = [size + 2 * more - 2 for size, more in zip(x.shape[2:], padding, strict=True)]
    out = torch.full((len(x), len(weight), *sides), torch.nan).to(x.dtype, memory_format=LAST)
    tensors = [t for t in (bias, other) if t is not None]
    words = tuple(padding), bias is not None, int(other is not None), WORDS.index(unary)
    winograd.call(x, torch.ops.ipex.winograd_weight(weight), *tensors, *words, out=out)
    return out


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("channels", "made", "sides", "padding"),
    [
        (16, 16, (1, 1), (1, 1)),
        (16, 48, (3, 4), (0, 0)),
        (48, 16, (5, 9), (1, 1)),
        (32, 32, (7, 2), (0, 1)),
        (80, 32, (13, 14), (2, 3)),
        (256, 16, (4, 11), (1, 1)),
    ],
)
def test_every_word_is_computed(channels: int, made: int, sides, padding, dtype) -> None:
    """Kernel and reference op against fp64: tiles and groups that are not whole, wide borders."""
    x, weight, bias = case(channels, made, sides, dtype=dtype)
    plain = F.conv2d(x.double(), weight.double(), None, 1, padding)
    other = torch.randn(plain.shape).to(dtype, memory_format=LAST)
    arranged = torch.ops.ipex.winograd_weight(weight)
    for added, unary, biased in itertools.product((False, True), WORDS, (True, False)):
        truth = plain + bias.double()[:, None, None] if biased else plain
        truth = UNARY[unary].fn(truth + other.double() if added else truth)
        given = bias if biased else None, other if added else None
        op = torch.ops.ipex.winograd(x, arranged, *given, padding, winograd.BINARY[added], unary)
        for result in (called(x, weight, *given, padding, unary), op):
            assert relative(result, truth) < LIMITS[dtype], (unary, added, biased)
            assert result.is_contiguous(memory_format=LAST)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "side"), [(64, 56), (512, 7)])
def test_results_are_as_near_as_torchs(channels: int, side: int, dtype: torch.dtype) -> None:
    """The distance from fp64 is no more than that of torch's convolution.

    In fp32 0.6 to 0.9 of it; in bf16 that of the truth rounded once, but for what lies so near the
    middle of two that sums in fp32 fall to the other side: 1e-6 of it was seen, 1e-3 is allowed.
    """
    x, weight, bias = case(channels, channels, (side, side), 1, dtype)
    truth = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    ours = relative(called(x, weight, bias, None, (1, 1), "none"), truth)
    rounded = relative(truth.to(dtype), truth)
    usual = relative(F.conv2d(x, weight, bias, padding=1), truth)
    assert ours < (usual if dtype == torch.float32 else 1.001 * rounded)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_what_is_infinite_stays_where_it_is(value: float, dtype: torch.dtype) -> None:
    """Only results whose window has it are so, and as torch's: a tile's sums mix its pixels.

    Two of 3e38 overflow there where their products with the weight do not.
    """
    x, weight, bias = case(32, 32, (12, 12), 1, dtype)
    x[0, 5, 3, 4] = x[0, 5, 3, 5] = value
    weight[7, 5] = 0  # zero times infinity
    result = called(x, weight, bias, None, (1, 1), "relu")
    truth = F.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu().to(dtype)
    # Of bf16 a unit of the last place, as what is halfway may be rounded to either side; and what
    # is finite leaves 2^-20 of itself in all pixels of its tile.
    wide = dtype == torch.float32
    rtol, atol = (2e-5, 1e-5) if wide else (2**-7, max(1e-5, 2**-20 * (value == 3e38) * value))
    torch.testing.assert_close(result, truth, rtol=rtol, atol=atol, equal_nan=True)


@needs_library
def test_what_is_large_leaves_little_beside_its_window() -> None:
    """In bf16, whose tiles mix 36 pixels: 2^-20 of it where a sum does not have it at all."""
    x, weight, _ = case(64, 64, (24, 24), 1, torch.bfloat16)
    for row, column in itertools.product(range(2, 22, 5), range(3, 22, 5)):
        x[0, :, row, column] *= 2.0**24  # in each place of a tile
    result = called(x, weight, None, None, (1, 1), "none")
    truth = F.conv2d(x.double(), weight.double(), padding=1)
    off = (result.double() - truth).abs() - 2**-8 * truth.abs()
    assert off.max() < 2**-20 * x.double().abs().max()


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_share_tiles_and_panels(dtype: torch.dtype) -> None:
    """The same by one thread and by three: of one block of tiles, each has some panels."""
    threads = torch.get_num_threads()
    for channels, made, side in ((32, 96, 6), (64, 64, 20)):
        x, weight, bias = case(channels, made, (side, side), 1, dtype)
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(called(x, weight, bias, None, (1, 1), "silu"))
        torch.set_num_threads(threads)
        assert torch.equal(*results)


class Block(nn.Module):
    """Two convolutions around a ReLU, with what came in added."""

    def __init__(self, channels: int = 64, made: int = 96, **how) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, made, 3, padding=1, **how)
        self.second = nn.Conv2d(made, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, H, W], channels-last."""
        return torch.relu(self.second(F.silu(self.first(x))) + x)


def chosen() -> int:
    """How many convolutions of the last graph were given to our kernel."""
    reasons = " ".join(event.reason for event in decisions.reports()[-1].events)
    count = re.search(r"(\d+) by this package's Winograd kernel", reasons)
    return int(count[1]) if count else 0


def compiled(model: nn.Module, **options: object):  # type: ignore[no-untyped-def]
    """By backend `ipex`; what falls back is an error."""
    torch.compiler.reset()
    decisions.clear()
    return torch.compile(model, backend="ipex", options={"strict": True, **options})


@needs_row
@pytest.mark.parametrize("dtype", CHOSEN, ids=str)
@torch.no_grad()
def test_convolutions_are_chosen_and_follow_their_weights(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, split = [], prologue.split

    def seen(*args: Any, **kwargs: Any) -> Any:
        splits.append(split(*args, **kwargs))
        return splits[-1]

    monkeypatch.setattr(prologue, "split", seen)
    model = Block().eval().to(dtype, memory_format=LAST)
    x = torch.randn(2, 64, 15, 17).to(dtype, memory_format=LAST)
    run = compiled(model)
    for _ in range(2):
        result = run(x)
        assert chosen() == 2
        told = {t.dtype for t in splits[-1].example_inputs if t.dim() == 4 and t.shape[-1] == PANEL}
        assert told == {torch.float32}  # Inductor goes by what it is told of packed weights
        # Of bf16 what is between the two is rounded as well.
        assert relative(result, copy.deepcopy(model).double()(x.double())) < 2 * LIMITS[dtype]
        assert result.is_contiguous(memory_format=LAST)
        model.first.weight.mul_(2)  # in place, as training does
        model.second.bias.add_(1)


@needs_row
@pytest.mark.usefixtures("op_by_op")
@torch.no_grad()
def test_what_is_not_faster_or_cannot_be_is_left_to_onednn() -> None:
    """Strides, holes, groups, windows, odd or few channels, few or wasteful tiles, other words."""
    bounds = choice.FASTER[ROW]
    near = (
        (nn.Conv2d(64, 64, 3, 2, 1), 15),
        (nn.Conv2d(64, 64, 3, 1, 2, dilation=2), 15),
        (nn.Conv2d(64, 64, 3, 1, 1, groups=2), 15),
        (nn.Conv2d(64, 64, (3, 5), 1, 1), 15),
        (nn.ConvTranspose2d(64, 64, 3, 1, 1), 15),
        (nn.Conv2d(72, 64, 3, 1, 1), 15),
        (nn.Conv2d(64, 72, 3, 1, 1), 15),
        (nn.Conv2d(max(bounds.channels - 16, 8), 64, 3, 1, 1), 15),
        (nn.Conv2d(64, max(bounds.channels_out - 16, 8), 3, 1, 1), 15),
        (nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1), nn.LeakyReLU(0.1)), 15),
        (nn.Conv2d(64, 64, 3, 1, 1), 2 * math.isqrt(bounds.tiles - 1)),
        (nn.Conv2d(64, 64, 3, 1, 1), 5),
    )
    for model, side in near:
        model = model.eval().to(memory_format=LAST)
        channels = next(model.parameters()).shape[1] * getattr(model, "groups", 1)
        x = torch.randn(1, channels, side, side).to(memory_format=LAST)
        result = compiled(model)(x)
        assert chosen() == 0, model
        assert relative(result, copy.deepcopy(model).double()(x.double())) < LIMIT
    for options in ({"blocked_products": False}, {"weight_prologue_bytes": 700_000}):
        # Both weights in oneDNN's layout take 442,368 bytes, of 16 numbers for 9 344,064 more.
        compiled(Block().eval().to(memory_format=LAST), **options)(
            torch.randn(1, 64, 15, 15).to(memory_format=LAST)
        )
        assert chosen() == ("weight_prologue_bytes" in options)


@needs_row
@pytest.mark.skipif(torch.bfloat16 not in CHOSEN, reason="oneDNN's convolutions are kept here")
@pytest.mark.usefixtures("op_by_op")
@torch.no_grad()
def test_bf16_of_few_or_wasteful_tiles_is_left_to_onednn() -> None:
    """Few tiles, tiles beyond the border, few channels of few tiles; the last is taken."""
    for channels, sides, taken in (
        (64, (1, 7), 0),
        (64, (2, 9), 0),
        (32, (1, 14), 0),
        (96, (1, 14), 1),
    ):
        model = nn.Conv2d(channels, channels, 3, 1, 1).eval().to(torch.bfloat16, memory_format=LAST)
        batch, side = sides
        x = torch.randn(batch, channels, side, side).bfloat16().to(memory_format=LAST)
        result = compiled(model)(x)
        assert chosen() == taken, channels
        truth = copy.deepcopy(model).double()(x.double())
        assert relative(result, truth) < LIMITS[torch.bfloat16]


@needs_row
@torch.no_grad()
def test_a_cached_graph_is_right_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was filled elsewhere: torch's ops then."""
    model = Block().eval().to(memory_format=LAST)
    x = torch.randn(1, 64, 9, 9).to(memory_format=LAST)
    run = compiled(model)
    expected = run(x)
    assert chosen() == 2
    monkeypatch.setattr(winograd, "why_not", lambda: "for this test")
    assert relative(run(x), expected.double()) < LIMIT


@needs_row
@pytest.mark.slow
@pytest.mark.parametrize("dtype", CHOSEN, ids=str)
@torch.no_grad()
def test_a_package_has_them_in_its_code(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called in C++: no library of ours is loaded."""
    model = Block().eval().to(dtype, memory_format=LAST)
    x = torch.randn(2, 64, 11, 9).to(dtype, memory_format=LAST)
    path = tmp_path / "model.ipexbundle"
    made = ipex_inductor.package(model, (x,), path)
    told = {event.subject: event.reason for event in made.report.events if event.kind == "choice"}
    assert told["layers on packed weights"].startswith("2 by this package's Winograd kernel")
    run = ipex_inductor.load(path, weights=model.state_dict(), allow_unsigned=True)
    monkeypatch.setattr(cpu_library.LIBRARY, "library", None)  # nor called
    assert relative(run(x), copy.deepcopy(model).double()(x.double())) < 2 * LIMITS[dtype]

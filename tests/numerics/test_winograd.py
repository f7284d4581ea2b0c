"""Convolutions by Winograd's way: what they compute, where they are chosen, and where not."""

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipex_inductor
from ipex_inductor import decisions
from ipex_inductor.ops.epilogue import UNARY
from ipex_inductor.passes import winograd as choice
from ipex_inductor.target import current
from ipex_inductor.templates import cpu_library, winograd
from ipex_inductor.templates.blocked import UNARY as WORDS

LAST = torch.channels_last
ROW = current("cpu").arch, torch.float32
needs_library = pytest.mark.skipif(
    cpu_library.why_not() is not None, reason=f"{cpu_library.why_not()}"
)
needs_row = pytest.mark.skipif(
    ROW not in choice.FASTER or cpu_library.why_not() is not None,
    reason="oneDNN's convolutions are kept here",
)
# Sums of some hundred terms in fp32, a few units of 2^-24; GELU's formula has 1.5e-7 of its own.
LIMIT = 1e-6


def relative(result: Tensor, truth: Tensor) -> float:
    """Distance of `result` from `truth`, as a share of its size."""
    return float((result.double() - truth).norm() / truth.norm())


def case(
    channels: int, made: int, sides: tuple[int, int], batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias."""
    torch.manual_seed(0)
    x = torch.randn(batch, channels, *sides).relu_().to(memory_format=LAST)
    return x, torch.randn(made, channels, 3, 3) / (9 * channels) ** 0.5, torch.randn(made)


def called(
    x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, padding, unary: str
) -> Tensor:
    """The kernel's result, in memory that was all NaN."""
    sides = [size + 2 * more - 2 for size, more in zip(x.shape[2:], padding, strict=True)]
    out = torch.full((len(x), len(weight), *sides), torch.nan).to(memory_format=LAST)
    tensors = [t for t in (bias, other) if t is not None]
    words = tuple(padding), bias is not None, int(other is not None), WORDS.index(unary)
    winograd.call(x, torch.ops.ipex.winograd_weight(weight), *tensors, *words, out=out)
    return out


@needs_library
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
def test_every_word_is_computed(channels: int, made: int, sides, padding) -> None:
    """Kernel and reference op against fp64: tiles and groups that are not whole, wide borders."""
    x, weight, bias = case(channels, made, sides)
    plain = F.conv2d(x.double(), weight.double(), None, 1, padding)
    other = torch.randn(plain.shape).to(memory_format=LAST)
    arranged = torch.ops.ipex.winograd_weight(weight)
    for added, unary, biased in itertools.product((False, True), WORDS, (True, False)):
        truth = plain + bias.double()[:, None, None] if biased else plain
        truth = UNARY[unary].fn(truth + other.double() if added else truth)
        given = bias if biased else None, other if added else None
        op = torch.ops.ipex.winograd(x, arranged, *given, padding, winograd.BINARY[added], unary)
        for result in (called(x, weight, *given, padding, unary), op):
            assert relative(result, truth) < LIMIT, (unary, added, biased)
            assert result.is_contiguous(memory_format=LAST)


@needs_library
@pytest.mark.parametrize(("channels", "side"), [(64, 56), (512, 7)])
def test_results_are_as_near_as_torchs(channels: int, side: int) -> None:
    """The distance from fp64 is no more than that of torch's convolution (0.6 to 0.9 of it)."""
    x, weight, bias = case(channels, channels, (side, side), 1)
    truth = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    ours = relative(called(x, weight, bias, None, (1, 1), "none"), truth)
    assert ours < relative(F.conv2d(x, weight, bias, padding=1), truth)


@needs_library
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_what_is_infinite_stays_where_it_is(value: float) -> None:
    """Only results whose window has it are so, and as torch's: a tile's sums mix four pixels.

    Two of 3e38 overflow there where their products with the weight do not.
    """
    x, weight, bias = case(32, 32, (12, 12), 1)
    x[0, 5, 3, 4] = x[0, 5, 3, 5] = value
    weight[7, 5] = 0  # zero times infinity
    result = called(x, weight, bias, None, (1, 1), "relu")
    truth = F.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu().float()
    torch.testing.assert_close(result, truth, rtol=2e-5, atol=1e-5, equal_nan=True)


@needs_library
def test_threads_share_tiles_and_panels() -> None:
    """The same by one thread and by three: of one block of tiles, each has some panels."""
    threads = torch.get_num_threads()
    for channels, made, side in ((32, 96, 6), (64, 64, 20)):
        x, weight, bias = case(channels, made, (side, side), 1)
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
    told = [e.reason for e in decisions.reports()[-1].events if "Winograd's way" in e.reason]
    return int(told[0].split()[0]) if told else 0


def compiled(model: nn.Module, **options: object):  # type: ignore[no-untyped-def]
    """By backend `ipex`; what falls back is an error."""
    torch.compiler.reset()
    decisions.clear()
    return torch.compile(model, backend="ipex", options={"strict": True, **options})


@needs_row
@torch.no_grad()
def test_convolutions_are_chosen_and_follow_their_weights() -> None:
    model = Block().eval().to(memory_format=LAST)
    x = torch.randn(2, 64, 15, 17).to(memory_format=LAST)
    run = compiled(model)
    for _ in range(2):
        result = run(x)
        assert chosen() == 2
        assert relative(result, copy.deepcopy(model).double()(x.double())) < LIMIT
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
        (nn.Conv2d(64, max(bounds.made - 16, 8), 3, 1, 1), 15),
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
@torch.no_grad()
def test_a_package_has_them_in_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called in C++: no library of ours is loaded."""
    model = Block().eval().to(memory_format=LAST)
    x = torch.randn(2, 64, 11, 9).to(memory_format=LAST)
    path = tmp_path / "model.ipexbundle"
    made = ipex_inductor.package(model, (x,), path)
    told = {event.subject: event.reason for event in made.report.events if event.kind == "choice"}
    assert told["products on packed weights"].startswith("2 by our kernel, Winograd")
    run = ipex_inductor.load(path, weights=model.state_dict(), allow_unsigned=True)
    monkeypatch.setattr(cpu_library, "library", None)  # nor called
    assert relative(run(x), copy.deepcopy(model).double()(x.double())) < LIMIT

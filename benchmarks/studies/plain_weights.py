"""Compare small GEMMs on a CPU: torch's kernels on plain weights, oneDNN's on packed ones.

    python -m benchmarks plain_weights [--threads N] [--json FILE] [--only WORDS]

Convolutions and linear layers in fp32 with a bias: alone, with an addend (`+`), and with a ReLU
(for torch's kernels a second call in place). Convolutions are only those for which torch uses its
own kernel, which creates no descriptors at each call. For linear layers oneDNN also runs on an
unpacked weight, as in training (`LEAST` of `passes/training/training.py`). Minima of interleaved
rounds, in microseconds of processor time a call, so that other load on the machine matters less.
`FASTER` of `passes/weights/plain.py` limits `products` (multiplications) and `pixels` (rows of a
linear layer). To restrict the CPU to a lower ISA:

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
    ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu_kernels import append_row, least_times, make_parser

ROUNDS = 25
mkldnn = torch.ops.mkldnn
Calls = dict[str, Callable[[], Tensor]]


class Conv(NamedTuple):
    """Batch, channels, those made, height and width of the image, of the window, stride, last."""

    batch: int
    channels: int
    made: int
    height: int
    width: int
    window: int = 1
    stride: int = 1
    last: bool = False


CHANNELS = ((8, 8), (16, 64), (64, 32), (64, 64), (128, 128), (256, 256))
IMAGES = ((1, 16), (1, 64), (1, 200), (8, 8), (16, 16), (28, 28))
LAYERS = ((16, 16), (64, 64), (128, 128), (256, 256), (512, 512), (768, 3072))


def convolutions() -> Iterator[Conv]:
    """Yield convolutions of one pixel, and of 3x3 windows, of lines and of images."""
    for last in (False, True):
        for (channels, made), (height, width) in itertools.product(CHANNELS, IMAGES):
            for batch in (1, 2, 8):
                yield Conv(batch, channels, made, height, width, last=last)
        for channels, made in ((3, 8), *((n, n) for n in (8, 16, 32, 64))):
            for side, stride in itertools.product((4, 8, 14, 28), (1, 2)):
                yield Conv(1, channels, made, side, side, 3, stride, last)
        for channels, batch in itertools.product((16, 64), (1, 8)):
            yield Conv(batch, channels, channels, 1, 64, 3, last=last)


def of_conv(case: Conv) -> tuple[Calls, int]:
    """Return the calls by name, none if torch gives it to oneDNN, and its multiplications."""
    x = torch.randn(case.batch, case.channels, case.height, case.width)
    high = min(case.window, case.height)  # of a line, too
    weight = torch.randn(case.made, case.channels, high, case.window)
    packed_from = weight
    if case.last:
        x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
    bias = torch.randn(case.made)
    window = [high // 2, case.window // 2], [case.stride] * 2, [1, 1]
    padding, stride, dilation = window
    rest = stride, padding, dilation, False, [0, 0], 1
    if torch._C._select_conv_backend(x, weight, bias, *rest, [case.made]).name != "Slow2d":
        return {}, 0
    packed = mkldnn._reorder_convolution_weight(packed_from, *window, 1, list(x.shape))
    behind = (packed, bias, *window, 1)
    plain = functools.partial(torch.convolution, x, weight, bias, *rest)
    pointwise = functools.partial(mkldnn._convolution_pointwise, x, *behind)
    other = plain()
    binary = functools.partial(mkldnn._convolution_pointwise.binary, x, other, *behind)
    calls = {
        "plain": plain,
        "packed": lambda: pointwise("none", [], ""),
        "plain +": lambda: plain().add_(other),
        "packed +": lambda: binary("add", 1.0, None, [], None),
        "plain relu": lambda: plain().relu_(),
        "packed relu": lambda: pointwise("relu", [], ""),
    }
    return calls, other.numel() * math.prod(weight.shape[1:])


def of_layer(rows: int, depth: int, columns: int) -> tuple[Calls, int]:
    """Return the calls by name, and the multiplications, of a linear layer."""
    x, weight, bias = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
    packed = mkldnn._reorder_linear_weight(weight, rows)
    other = torch.randn(rows, columns)
    plain = functools.partial(torch.addmm, bias, x, weight.t())
    pointwise = functools.partial(mkldnn._linear_pointwise, x, packed, bias)
    binary = functools.partial(mkldnn._linear_pointwise.binary, x, other, packed, bias)
    calls = {
        "plain": plain,
        "packed": lambda: pointwise("none", [], ""),
        "plain +": lambda: plain().add_(other),
        "packed +": lambda: binary("add"),
        "plain relu": lambda: plain().relu_(),
        "packed relu": lambda: pointwise("relu", [], ""),
        "unpacked relu": lambda: mkldnn._linear_pointwise(x, weight, bias, "relu", [], ""),
    }
    return calls, rows * depth * columns


def cases() -> Iterator[tuple[dict[str, Any], Calls]]:
    """Yield what a row says of the case, and the calls by name."""
    for case in convolutions():
        calls, products = of_conv(case)
        if calls:
            pixels = products // math.prod((case.channels, case.made, case.window))
            pixels //= min(case.window, case.height)
            yield {**case._asdict(), "pixels": pixels, "products": products}, calls
    for rows, (depth, columns) in itertools.product((1, 4, 16, 64, 256, 1024), LAYERS):
        calls, products = of_layer(rows, depth, columns)
        about = {"layer": "linear", "depth": depth, "columns": columns}
        about |= {"pixels": rows, "products": products}
        yield about, calls


@torch.no_grad()
def main() -> None:
    """Print a row a case; with --json also append it to FILE."""
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    for row, calls in cases():
        if options.only not in str(row):
            continue
        best = least_times(calls, "packed", ROUNDS)
        for name in ("", " +", " relu"):
            row[f"packed{name}, us"] = round(best[f"packed{name}"], 1)
            row[f"speedup{name}"] = round(best[f"packed{name}"] / best[f"plain{name}"], 2)
        if "unpacked relu" in best:
            row["of unpacked relu"] = round(best["unpacked relu"] / best["plain relu"], 2)
        append_row(row, options)


if __name__ == "__main__":
    main()

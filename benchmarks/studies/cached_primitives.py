"""Compare convolutions on a CPU: cached oneDNN primitives (`[onednn]`) and torch's.

    python -m benchmarks cached_primitives [--threads N] [--batch N] [--json FILE] [--only WORDS]

Each on packed weights, with bias. Minima of interleaved rounds, in microseconds of processor time a
call, so that other load on the machine matters less. `torch's` is its largest difference from ours,
relative to the largest result. `FASTER` of `passes/weights/cached_primitives.py` limits `products`
(multiplications) and the bytes of a result with an addend.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ipex_inductor import ops
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.ops.conv.cached_primitives import Geometry
from ipex_inductor.templates.cpu import cached_primitives

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu_kernels import append_row, least_times, make_parser

ROUNDS = 40
LAST = torch.channels_last
SCALARS: dict[str, list[float]] = {"hardtanh": [0, 6], "leaky_relu": [0.1]}
mkldnn = torch.ops.mkldnn
assert ops


class Case(NamedTuple):
    """Channels, those made, side of the image, of the window, stride, groups, addend, last."""

    channels: int
    made: int
    side: int
    window: int
    stride: int = 1
    groups: int = 1
    added: int = 0
    unary: str = "relu"


RESNET = (Case(3, 64, 224, 7, 2), Case(64, 64, 56, 3), Case(128, 128, 28, 3), Case(512, 512, 7, 3))
RESNET += (Case(128, 128, 56, 3, 2), Case(256, 64, 56, 1), Case(64, 256, 56, 1, added=1))
RESNET += (Case(256, 512, 56, 1, 2), Case(2048, 512, 7, 1), Case(64, 64, 56, 3, added=1))
RESNET += (Case(128, 512, 28, 1, added=1), Case(256, 1024, 14, 1, added=1))
RESNET += (Case(512, 2048, 7, 1, added=1), Case(512, 512, 7, 3, added=1))
DENSE = (Case(3, 32, 224, 3, 2), Case(3, 768, 224, 16, 16), Case(3, 96, 224, 4, 4))
DENSE += (Case(16, 96, 112, 1), Case(24, 144, 56, 1), Case(320, 1280, 7, 1), Case(96, 8, 1, 1))
DENSE += (Case(1, 8, 28, 3), Case(17, 13, 28, 3), Case(64, 3, 64, 3), Case(8, 8, 9, 3))
DEPTHWISE = ((32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (384, 14, 3, 1), (960, 7, 3, 1))
DEPTHWISE += ((32, 112, 5, 1), (120, 28, 5, 1), (240, 14, 5, 1), (672, 14, 5, 2), (960, 7, 5, 1))
DEPTHWISE += ((96, 56, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1), (21, 28, 3, 1))
GROUPED = ((128, 56, 1, 32), (256, 56, 2, 32), (256, 28, 1, 32), (512, 14, 1, 32))
GROUPED += ((1024, 14, 1, 32), (256, 56, 1, 64), (64, 56, 1, 2), (64, 28, 1, 4))
GROUPED += ((256, 14, 1, 32), (512, 7, 1, 32), (240, 28, 1, 3), (128, 28, 1, 8), (128, 56, 2, 16))
GROUPED += ((256, 7, 1, 32), (128, 14, 1, 16), (64, 28, 1, 8), (64, 14, 1, 8))
# Behind a depthwise one, behind one pixel, and a gate of one pixel.
ACTIVATED = ((240, 240, 14, 5, 1, 240), (96, 96, 112, 3, 2, 96), (24, 144, 56, 1), (960, 240, 1, 1))
INVERTED = ((144, 24, 56), (192, 32, 28), (384, 64, 14), (576, 96, 14), (960, 160, 7))
CASES = (*RESNET, *DENSE, *(Case(n, n, side, w, s, n) for n, side, w, s in DEPTHWISE))
CASES += tuple(Case(n, n, side, 3, stride, groups) for n, side, stride, groups in GROUPED)
CASES += tuple(Case(*sizes, 1, added=1, unary="none") for sizes in INVERTED)
CASES += tuple(
    Case(*sizes)._replace(unary=word) for word in cached_primitives.UNARY for sizes in ACTIVATED
)


def calls(
    case: Case, batch: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Name and call; nothing where that oneDNN has no kernel worth the name."""
    channels, made, side, window, stride, groups, added, unary = case
    padding = 0 if window == stride else window // 2
    out = (side + 2 * padding - window) // stride + 1
    pairs = [(n, n) for n in (window, out, stride, padding, 1)]
    head = cached_primitives.TYPES[dtype], batch, channels, side, side, made
    geometry = Geometry(*head, *pairs, groups, 1, added)
    scalars = SCALARS.get(unary, [])
    try:
        tag, size = cached_primitives.layout(geometry, unary, scalars)
    except cached_primitives.KeptError:
        return
    x = torch.randn(batch, channels, side, side).to(dtype).to(memory_format=LAST)
    weight = torch.randn(geometry.weight).div_(math.prod(geometry.weight[1:]) ** 0.5).to(dtype)
    bias = torch.randn(made).to(dtype)
    # In place torch saves a copy of the addend; that the addend grows changes no speed.
    other = torch.zeros(batch, made, out, out, dtype=dtype).to(memory_format=LAST)
    arranged = cached_primitives.laid_out(weight, groups, tag, size // weight.element_size())
    rest = (bias, other) if added else (bias,)
    known = tuple(geometry.flat()), unary, tuple(scalars)

    def ours() -> torch.Tensor:
        result = torch.empty_like(other)
        cached_primitives.call(x, arranged, *rest, *known, tag, out=result)
        return result

    place = [padding] * 2, [stride] * 2, [1, 1], groups
    packed = mkldnn._reorder_convolution_weight(weight, *place, list(x.shape))
    plain = functools.partial(mkldnn._convolution_pointwise, x, packed, bias, *place)
    summed = functools.partial(mkldnn._convolution_pointwise_.binary, other, x, packed, bias)
    yield "kept", ours
    word = UNARY[unary]
    last = word.onednn_name, scalars, word.algorithm
    behind = None if unary == "none" else word.onednn_name, scalars, word.algorithm
    yield "torch", (lambda: summed(*place, "add", 1.0, *behind)) if added else lambda: plain(*last)


@torch.no_grad()
def main() -> None:
    """Print a row a case; with --json also append it to FILE."""
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if reason := cached_primitives.why_not():
        raise SystemExit(reason)
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float32):
            row = {"dtype": str(dtype), "batch": options.batch, **case._asdict()}
            made = dict(calls(case, options.batch, dtype))
            if options.only not in str(row) or not made:
                continue
            first = [call().double() for call in made.values()]
            best = least_times(made, "torch", ROUNDS)
            sizes = first[0].numel() * (case.channels // case.groups) * case.window**2
            error = float((first[0] - first[1]).abs().max() / first[0].abs().max())
            row |= {f"{name}, us": round(time, 1) for name, time in best.items()}
            row |= {"products": sizes, "torch's": error}
            row["speedup"] = round(best["torch"] / best["kept"], 3)
            append_row(row, options)


if __name__ == "__main__":
    main()

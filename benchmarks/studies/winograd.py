"""Compare 3 x 3 convolutions on a CPU: our Winograd kernel, and oneDNN's.

    python -m benchmarks winograd [--threads N] [--rounds N] [--json FILE] [--only WORDS]
        [--dtype bfloat16]

Each on a packed weight, with bias and ReLU. Minima of interleaved rounds, in microseconds of
processor time a call, so that other load on the machine matters less. `cold` has its memory out of
the caches, as a call within a model. Errors are relative to fp64 (of norms), on non-negative
activations, as after a ReLU.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from ipex_inductor import ops
from ipex_inductor.templates.cpu import cached_primitives, cpu_library, winograd
from ipex_inductor.templates.cpu.blocked import UNARY

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu_kernels import append_row, make_parser

LAST = torch.channels_last
mkldnn = torch.ops.mkldnn
assert ops
# Channels, those made, side, images.
RESNET = ((64, 64, 56, 1), (128, 128, 28, 1), (256, 256, 14, 1), (512, 512, 7, 1))
BATCHES = tuple((c, c, side, 16) for c, _, side, _ in RESNET)
FEW = tuple((c, c, side, 1) for c, side in itertools.product((16, 32, 48, 64), (112, 28, 14)))
SMALL = tuple((c, c, side, 1) for c, side in itertools.product((128, 512), (10, 6, 5, 4, 2)))
SMALL += tuple((c, c, side, 1) for c, side in itertools.product((32, 48, 64), (8, 7, 6, 5)))
OTHERS = ((64, 16, 56, 1), (16, 64, 56, 1), (32, 256, 28, 1), (256, 32, 28, 1), (64, 128, 56, 1))
OTHERS += ((64, 64, 224, 1), (1024, 1024, 7, 1), (1024, 1024, 14, 1), (512, 256, 28, 1))
OTHERS += ((192, 192, 35, 1), (96, 96, 17, 1), (512, 512, 28, 1), (128, 128, 56, 4))
CASES = (*RESNET, *BATCHES, *FEW, *SMALL, *OTHERS)


def calls(
    dtype: torch.dtype, channels: int, made: int, side: int, batch: int
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Name and call; the last is the truth in fp64."""
    x = torch.randn(batch, channels, side, side).relu_().to(dtype, memory_format=LAST)
    weight = torch.randn(made, channels, 3, 3).div_((9 * channels) ** 0.5).to(dtype)
    bias = torch.randn(made).to(dtype)
    out = torch.empty(batch, made, side, side, dtype=dtype, memory_format=LAST)
    ours = torch.ops.ipex.winograd_weight(weight)

    def by_tiles() -> torch.Tensor:
        winograd.call(x, ours, bias, (1, 1), True, 0, UNARY.index("relu"), out=out)
        return out

    place = [1, 1], [1, 1], [1, 1], 1
    packed = mkldnn._reorder_convolution_weight(weight, *place, list(x.shape))
    yield "ours", by_tiles
    yield "torch", partial(mkldnn._convolution_pointwise, x, packed, bias, *place, "relu", [], "")
    if cached_primitives.why_not() is None:
        pairs = [(n, n) for n in (3, side, 1, 1, 1)]
        geometry = cached_primitives.Geometry(
            cached_primitives.TYPES[dtype], *x.shape, made, *pairs, 1, 1, 0
        )
        tag, size = cached_primitives.layout(geometry, "relu")
        arranged = cached_primitives.laid_out(weight, 1, tag, size // dtype.itemsize)
        numbers, made_by_kept = tuple(geometry.flat()), torch.empty_like(out)

        def by_kept() -> torch.Tensor:
            cached_primitives.call(x, arranged, bias, numbers, "relu", (), tag, out=made_by_kept)
            return made_by_kept

        yield "kept", by_kept
    truth = torch.conv2d(x[:1].double(), weight.double(), bias.double(), padding=1).relu()
    yield "truth", lambda: truth


def time_calls(call: Callable[[], torch.Tensor], count: int) -> float:
    """Return processor time of one of `count` calls, in microseconds."""
    begin = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begin) / count * 1e6


@torch.no_grad()
def main() -> None:
    """Print a row a case; with --json also append it to FILE."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if reason := cpu_library.why_not():
        raise SystemExit(reason)
    others = torch.zeros(24 << 20)  # what a model has beside, 96 MiB
    for case in CASES:
        row = dict(zip(("channels", "made", "side", "batch"), case, strict=True))
        row |= {} if options.dtype == "float32" else {"dtype": options.dtype}
        if options.only not in str(row):
            continue
        made = dict(calls(getattr(torch, options.dtype), *case))
        truth = made.pop("truth")()
        errors = {
            name: float((call()[:1] - truth).norm() / truth.norm()) for name, call in made.items()
        }
        warm, cold = dict.fromkeys(made, float("inf")), dict.fromkeys(made, float("inf"))
        count = max(1, int(3e3 / time_calls(made["torch"], 2)))
        for _ in range(options.rounds):
            for name, call in made.items():
                call()
                warm[name] = min(warm[name], time_calls(call, count))
            for name, call in made.items():
                others.add_(1)
                cold[name] = min(cold[name], time_calls(call, 1))
        for name in made:
            row |= {f"{name}, us": round(warm[name], 1), f"{name}, cold": round(cold[name], 1)}
            row |= {f"{name}, error": errors[name]}
        rest = [name for name in made if name != "ours"]
        row["speedup"] = round(min(warm[name] for name in rest) / warm["ours"], 3)
        row["cold"] = round(min(cold[name] for name in rest) / cold["ours"], 3)
        append_row(row, options)


if __name__ == "__main__":
    main()

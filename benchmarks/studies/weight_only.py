"""Time linear layers on quantized weights beside bf16 and torch's packed kernels.

    python -m benchmarks weight_only [--rows 1,4] [--shapes 5632x2048,2048x2048] [--threads 1]
    python -m benchmarks weight_only --device cuda [--quick] [--tiles] [--rows ...] [--shapes ...]

Each call reads another copy of the weight: all copies together are larger than caches are. On CPUs
times are minima of interleaved rounds, in microseconds of processor time for one thread, of wall
time for more. On a GPU they are of CUDA graphs, `--tiles` adds each tile of the template, and
`--quick` measures one type of weights in all sizes, the others for one row alone.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from common import weight_only_cuda
from ipex_inductor.ops.gemm.blocked import arrange_panels
from ipex_inductor.ops.quant.weight_only import INTEGERS, NIBBLES, STORED, Scheme
from ipex_inductor.templates.cpu import blocked, weight_only

SHAPES = "5632x2048,14336x4096,4864x896,2048x2048"  # N x K of language models
ROWS = "1,4"
TOTAL = 400 << 20  # bytes of all copies of a weight
ROUNDS = 7
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Variant:
    """A way to compute the layer: makes weights, and calls with one of them."""

    size: int  # bytes of a weight
    make: Callable[[], Any]
    run: Callable[[Tensor, Any], object]

    @property
    def copies(self) -> int:
        """Return how many weights are read in turn."""
        return max(2, TOTAL // self.size)


def run_blocked(x: Tensor, weight: Tensor, columns: int) -> None:
    """Run the package's own bf16 kernel."""
    out = torch.empty(x.shape[0], columns, dtype=x.dtype)
    blocked.call(x, weight, columns, False, 0, 0, out=out)


def quantized(columns: int, depth: int, scheme: Scheme, zeros: bool) -> Variant:
    """Return the kernel on quantized weights."""
    name, groups = scheme.weight_dtype, -(-depth // scheme.group_size)
    width = depth // 2 if name in NIBBLES else depth

    def make() -> tuple[Tensor, Tensor, Tensor | None]:
        bits = torch.randint(0, 120, (columns, width), dtype=torch.uint8)  # no NaN of FP8
        shape = columns, groups
        points = torch.randint(0, 16, shape).to(INTEGERS[name]) if zeros else None
        return bits.view(STORED[name]), torch.rand(shape).to(BF16), points

    def run(x: Tensor, weight: tuple[Tensor, Tensor, Tensor | None]) -> None:
        out = torch.empty(x.shape[0], columns, dtype=x.dtype)
        weight_only.run(x, *weight, None, None, scheme, out)

    return Variant(columns * width, make, run)


def list_variants(columns: int, depth: int) -> dict[str, Variant]:
    """Return all ways to compute a layer [columns, depth], by name."""
    shape = columns, depth

    def make_int4_pack() -> tuple[Tensor, Tensor]:
        bits = torch.randint(0, 16, shape, dtype=torch.int32)
        scales = torch.rand(depth // 128, columns, 2).to(BF16)
        return torch._convert_weight_to_int4pack_for_cpu(bits, 1), scales

    def make_int8_pack() -> tuple[Tensor, Tensor]:
        return torch.randint(-128, 128, shape, dtype=torch.int8), torch.rand(columns).to(BF16)

    size = columns * depth
    variants = {
        "bf16, this package": Variant(
            2 * size,
            lambda: arrange_panels(torch.randn(shape).to(BF16)),
            lambda x, weight: run_blocked(x, weight, columns),
        ),
        "bf16, torch": Variant(2 * size, lambda: torch.randn(shape).to(BF16), F.linear),
        "int4 pack of torch, 128": Variant(
            size // 2,
            make_int4_pack,
            lambda x, w: torch._weight_int4pack_mm_for_cpu(x, w[0], 128, w[1]),
        ),
        "int8 pack of torch": Variant(
            size, make_int8_pack, lambda x, w: torch._weight_int8pack_mm(x, *w)
        ),
    }
    for name, compute, group in (
        *(("int4", "int8", 128), ("int4", "int8", 64), ("int4", "int8", 32)),
        *(("int4", "bfloat16", 128), ("nf4", "bfloat16", 64)),
        *(("int8", "int8", depth), ("int8", "bfloat16", depth), ("fp8", "bfloat16", depth)),
    ):
        scheme = Scheme(name, group, compute)
        label = f"{name} in {compute}, {'row' if group == depth else group}"
        variants[label] = quantized(columns, depth, scheme, name == "int4")
    return variants


def measure(variants: dict[str, Variant], rows: int, depth: int, clock: Any) -> dict[str, float]:
    """Return the least seconds of a call of each variant, in interleaved rounds."""
    x = torch.randn(rows, depth).to(BF16)
    weights = {name: [v.make() for _ in range(v.copies)] for name, v in variants.items()}
    best = dict.fromkeys(variants, float("inf"))
    for turn in range(ROUNDS + 1):  # the first one warms up
        for name, variant in variants.items():
            start = clock()
            for weight in weights[name]:
                variant.run(x, weight)
            if turn:
                best[name] = min(best[name], (clock() - start) / variant.copies)
    return best


@torch.no_grad()
def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", help="rows of x, with commas between")
    parser.add_argument("--shapes", help="N x K, with commas between")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="on a GPU: few types of weights")
    parser.add_argument("--tiles", action="store_true", help="on a GPU: each tile of the template")
    words = parser.parse_args()
    if words.device == "cuda":
        shapes, rows = words.shapes or weight_only_cuda.SHAPES, words.rows or weight_only_cuda.ROWS
        weight_only_cuda.run(shapes, rows, words.quick, words.tiles)
        return
    run_on_cpu(words.shapes or SHAPES, words.rows or ROWS, words.threads)


def run_on_cpu(shapes: str, rows: str, threads: int) -> None:
    """Print a table for each shape and number of rows.

    Args:
        shapes: N x K, with commas between.
        rows: numbers of rows, with commas between.
        threads: number of threads.
    """
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    for shape in shapes.split(","):
        columns, depth = map(int, shape.split("x"))
        variants = list_variants(columns, depth)
        for count in map(int, rows.split(",")):
            best = measure(variants, count, depth, clock)
            base = best["bf16, this package"]
            print(f"[{count}, {depth}] x [{columns}, {depth}]")
            for name, seconds in best.items():
                rate = variants[name].size / seconds / 1e9
                print(
                    f"  {name:26} {seconds * 1e6:9.1f} us {rate:6.1f} GB/s {base / seconds:5.2f} x"
                )


if __name__ == "__main__":
    main()

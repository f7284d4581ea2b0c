"""Measure norms and softmax of wide rows on a GPU, with rows held in registers and read twice.

    python -m benchmarks row_reductions [--seconds S] [--json FILE]

In bf16; microseconds of the device, as CUDA graphs replayed in turns. Norms are of a sum, which is
a result too. Both are compiled with backend `ipex`: once as usual, and once with rule
`row-reductions` off, which is Inductor's kernel.
"""

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.lowerings.pointwise.row_reductions import NAME

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.gpu_peers import append_row, capture_graph, describe_run, time_in_turns

SIZES = (
    *((46720, 1280), (16384, 1536), (16384, 2048), (2048, 2048), (256, 2048)),
    *((8192, 3072), (8192, 4096), (64, 4096), (4096, 6144), (4096, 8192)),
)
PEERS = {"in registers": "", "read twice": f"-{NAME}"}


def norm_layer(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return a sum and its layer norm."""
    total = x + other
    return total, F.layer_norm(total, weight.shape, weight, weight)


def norm_root(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return a sum and its RMS norm."""
    total = x + other
    return total, F.rms_norm(total, weight.shape, weight)


def weigh(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the softmax of `x`."""
    return (torch.softmax(x.float(), -1).to(x.dtype),)


FUNCTIONS = {"layer norm": norm_layer, "RMS norm": norm_root, "softmax": weigh}


@torch.no_grad()
def measure(
    options: argparse.Namespace, about: dict[str, str], name: str, size: tuple[int, int]
) -> None:
    """Print the row of one function and size."""
    function: Callable[..., Any] = FUNCTIONS[name]
    x, other = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(size[1], device="cuda", dtype=torch.bfloat16)
    exact = function(x.double(), other.double(), weight.double())[-1]
    row: dict[str, Any] = {"function": name, "rows": size[0], "width": size[1]}
    graphs = {}
    for peer, rules in PEERS.items():
        torch.compiler.reset()
        settings = {"strict": True, "rules": rules, "capture": False}
        compiled = torch.compile(function, backend="ipex", options=settings)
        call = functools.partial(compiled, other=other, weight=weight)
        error = (call(x)[-1].double() - exact).norm() / exact.norm()
        row[f"error, {peer}"] = float(error)
        graphs[peer] = capture_graph(call, x).replay
    for peer, times in time_in_turns(graphs, options.seconds, length=20).items():
        row[f"{peer}, us"] = round(1e3 * statistics.median(times), 2)
    row["ratio"] = round(row["read twice, us"] / row["in registers, us"], 3)
    append_row(options, about, row)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing a case")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    about = describe_run()
    for name, size in itertools.product(FUNCTIONS, SIZES):
        measure(options, about, name, size)


if __name__ == "__main__":
    main()

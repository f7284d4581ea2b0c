"""Measure convolutions whose windows do not overlap, as cuDNN computes them and as GEMMs.

    python -m benchmarks patches [--seconds S] [--json FILE]

In bf16 and fp16, for images and activations in both layouts; microseconds of the device, as CUDA
graphs replayed in turns. Both are compiled by Inductor in default mode, so copies are its kernels.
The result is tokens (N, pixels, channels), which is what networks make of it.
"""

import argparse
import functools
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.passes.restated.patches import multiply_patches

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.gpu_peers import append_row, capture_graph, describe_run, time_in_turns

# Network, batch, channels, pixels of a side, pixels of a window's side, outputs.
CASES = (
    ("ViT-B/32, CLIP", 64, 3, 224, 32, 768),
    ("ViT-B/16", 64, 3, 224, 16, 768),
    ("ViT-L/14", 32, 3, 224, 14, 1024),
    ("ViT-S/8", 16, 3, 224, 8, 384),
    ("Swin-T, ConvNeXt-T", 64, 3, 224, 4, 96),
    ("SegFormer-B2, stage 1", 8, 64, 128, 8, 64),
    ("SegFormer-B2, stage 2", 8, 128, 64, 4, 128),
    ("SegFormer-B2, stage 3", 8, 320, 32, 2, 320),
    ("ConvNeXt-T, stage 2", 64, 96, 56, 2, 192),
    ("ConvNeXt-B, stage 4", 64, 512, 14, 2, 1024),
)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, stride: list[int]) -> Tensor:
    """Compute it by cuDNN."""
    return F.conv2d(x, weight, bias, stride).flatten(2).transpose(1, 2)


def multiply(x: Tensor, weight: Tensor, bias: Tensor, stride: list[int]) -> Tensor:
    """Compute it as a GEMM on patches."""
    return multiply_patches(x, weight, bias, stride).flatten(2).transpose(1, 2)


@torch.no_grad()
def measure(
    options: argparse.Namespace,
    about: dict[str, str],
    case: tuple[Any, ...],
    dtype: Any,
    last: bool,
) -> None:
    """Print the row of one case."""
    name, batch, channels, pixels, side, outputs = case
    x = torch.randn(batch, channels, pixels, pixels, device="cuda", dtype=dtype)
    weight = torch.randn(outputs, channels, side, side, device="cuda", dtype=dtype)
    bias = torch.randn(outputs, device="cuda", dtype=dtype)
    if last:
        x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
    graphs = {}
    torch.compiler.reset()
    exact = convolve(x.double(), weight.double(), bias.double(), [side, side])
    row: dict[str, Any] = {"network": name, "dtype": str(dtype)[6:], "channels-last": last}
    for peer, run in (("cuDNN", convolve), ("GEMM", multiply)):
        constants = {"weight": weight, "bias": bias, "stride": [side, side]}
        call = functools.partial(torch.compile(run), **constants)
        row[f"error of {peer}"] = float((call(x).double() - exact).norm() / exact.norm())
        graphs[peer] = capture_graph(call, x).replay
    for peer, times in time_in_turns(graphs, options.seconds, length=20).items():
        row[f"{peer}, us"] = round(1e3 * statistics.median(times), 2)
    row["ratio"] = round(row["cuDNN, us"] / row["GEMM, us"], 3)
    append_row(options, about, row)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing a case")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    about = describe_run()
    for case, dtype, last in itertools.product(
        CASES, (torch.bfloat16, torch.float16), (False, True)
    ):
        measure(options, about, case, dtype, last)


if __name__ == "__main__":
    main()

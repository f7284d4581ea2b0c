"""Compare attention on one GPU: torch's fused kernels, and GEMMs by Inductor.

    python -m benchmarks ops attention [--part I/N] [--seconds S] [--json FILE]

In bf16, of projections as layers give them ([batch, tokens, 3, heads, width]): without a mask, and
with a bias of every head, contiguous or from an embedding of distances (heads last). `products` is
attention written by hand and compiled by Inductor: two batched GEMMs and a softmax. The other names
are torch's kernels, where they support the case; the row says which of them torch itself selects.
Each is checked against fp64, then captured in a CUDA graph and timed in turns; medians in
microseconds. The tables of `ipex_inductor/passes/attention/attention.py` hold the results.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.gpu_peers import append_row, capture_graph, describe_run, relative_errors, time_in_turns

# Batch, heads, tokens, width: windows of Swin, words of encoders, patches, long and wide ones.
CASES = [
    (4096, 4, 49, 32),
    (64, 4, 49, 32),
    (256, 32, 49, 32),
    (1024, 6, 64, 32),
    (1024, 4, 144, 32),
    (64, 12, 128, 64),
    (1, 12, 128, 64),
    (64, 12, 197, 64),
    (1, 12, 197, 64),
    (64, 8, 256, 64),
    (64, 8, 384, 64),
    (1, 8, 384, 64),
    (16, 12, 512, 64),
    (8, 16, 1024, 64),
    (1, 16, 1024, 64),
    (8, 16, 1024, 128),
    (16, 16, 128, 128),
]
MASKS = ("none", "bias", "heads last")
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# bf16 has 8 bits: of scores, of what they are multiplied with, and of the result.
CLOSE = 4 * 2**-8
Attention = Callable[[Tensor, Tensor | None], Tensor]


def split_heads(projected: Tensor) -> list[Tensor]:
    """Return query, key and value, by heads."""
    return [*projected.permute(2, 0, 3, 1, 4).unbind()]


def join_heads(result: Tensor) -> Tensor:
    """Concatenate the heads, as the next layer reads them."""
    batch, heads, tokens, width = result.shape
    return result.transpose(1, 2).reshape(batch, tokens, heads * width)


def attend_by_gemms(projected: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention by two batched GEMMs and a softmax."""
    query, key, value = split_heads(projected)
    scores = (query * (1 / math.sqrt(query.shape[-1]))) @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    return join_heads(weights @ value)


def attend_fused(projected: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention by torch's selected kernel."""
    return join_heads(F.scaled_dot_product_attention(*split_heads(projected), attn_mask=mask))


def attend_by(backend: SDPBackend) -> Attention:
    """Compute attention by the kernel of that name, or raise."""

    def attention(projected: Tensor, mask: Tensor | None) -> Tensor:
        with sdpa_kernel(backend):
            return attend_fused(projected, mask)

    return attention


def mask_of(kind: str, heads: int, tokens: int) -> Tensor | None:
    """A bias for each pair of tokens."""
    if kind == "none":
        return None
    bias = torch.randn(tokens, tokens, heads, device="cuda", dtype=torch.bfloat16).permute(2, 0, 1)
    return (bias.contiguous() if kind == "bias" else bias)[None]


def selected_kernel(projected: Tensor, mask: Tensor | None) -> str:
    """Return the name of the kernel that torch selects."""
    query, key, value = split_heads(projected)
    number = torch._fused_sdp_choice(query, key, value, mask)
    return SDPBackend(number).name.removesuffix("_ATTENTION").lower()


@torch.no_grad()
def measure_case(case: tuple[int, ...], kind: str, seconds: float) -> dict[str, Any]:
    """Return microseconds of each kernel that supports the case and is right."""
    batch, heads, tokens, width = case
    torch.manual_seed(0)
    projected = torch.randn(batch, tokens, 3, heads, width, device="cuda", dtype=torch.bfloat16)
    mask = mask_of(kind, heads, tokens)
    few = projected[:2].double(), None if mask is None else mask.double()
    exact = attend_by_gemms(*few)
    torch.compiler.reset()
    by_inductor = torch.compile(attend_by_gemms, dynamic=False, options={"pattern_matcher": False})
    peers: dict[str, Attention] = {"products": by_inductor}
    peers |= {name: attend_by(backend) for name, backend in KERNELS.items()}
    row: dict[str, Any] = {"case": case, "mask": kind, "torch's": selected_kernel(projected, mask)}
    graphs: dict[str, Callable[[], Any]] = {}
    for name, attend in peers.items():
        try:
            off = relative_errors(attend(projected, mask)[:2], exact)
            if off[0] > CLOSE:
                row[f"{name} failed"] = f"wrong by {off[0]}"
                continue
            graphs[name] = capture_graph(lambda x, a=attend: a(x, mask), projected).replay  # type: ignore[misc]
        except RuntimeError as error:
            row[f"{name} failed"] = str(error).strip().split("\n")[0][:100]
    times = time_in_turns(graphs, seconds)
    return row | {f"{name}, us": round(1e3 * statistics.median(times[name]), 2) for name in times}


def part_of(cases: list[Any], part: str) -> Iterator[Any]:
    """Return every N-th case, from the I-th on."""
    which, count = map(int, part.split("/"))
    yield from cases[which::count]


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", default="0/1", help="0/2 on one GPU, 1/2 on another")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing a case")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    about = describe_run()
    for case in part_of(CASES, options.part):
        for kind in MASKS:
            append_row(options, about, measure_case(case, kind, options.seconds))
    sys.exit(0)


if __name__ == "__main__":
    main()

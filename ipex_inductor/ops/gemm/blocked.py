"""`ipex::blocked`: a GEMM on a weight in blocks, with its epilogue; `ipex::blocks` arranges it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.runtime.huge_pages import on_huge_pages

COLUMNS = 64  # N of a block; weights are zero-padded to a multiple of it


@op("blocks")
def blocks(weight: Tensor, panel: int) -> Tensor:
    """Return the weight arranged in panels: `arrange_panels` as an op."""
    return arrange_panels(weight, panel)


def arrange_panels(weight: Tensor, panel: int = COLUMNS) -> Tensor:
    """Return weight [N, K] or [N, K, 1, 1] in panels, N padded with zeros to a multiple of 64.

    Args:
        weight: the plain weight.
        panel: 64, or a divisor of it; packages older than panels do not set it.

    Returns:
        In bf16 [N / panel, K / 2, panel, 2], where K must be even; in other dtypes [N / panel, K,
            panel, 1].
    """
    flat = weight.reshape(weight.shape[0], -1)
    more = -len(flat) % COLUMNS
    # The padded copy leaves a hole in the heap.
    filled = F.pad(flat, (0, 0, 0, more)) if more else flat
    count, depth, _, paired = shape = _shape(weight, panel)
    result = on_huge_pages(weight, shape)
    result.copy_(filled.view(count, panel, depth, paired).transpose(1, 2))
    return result


@blocks.register_fake
def _(weight: Tensor, panel: int) -> Tensor:
    return weight.new_empty(_shape(weight, panel))


@op("blocked")
def blocked_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    columns: int,
    binary: str,
    unary: str,
    image: bool,
) -> Tensor:
    """Return `unary(binary(x @ w.T + bias, other))`, rounded once.

    Args:
        x: [..., K]; with `image` [B, K, H, W].
        weight: [N, K] as `ipex::blocks` arranges it.
        bias: [N].
        other: as the result.
        columns: N.
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        image: True if x, `other` and the result are channels-last activations.

    Returns:
        [..., N]; with `image` [B, N, H, W] in channels-last.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    plain = weight.transpose(1, 2).reshape(-1, weight.shape[1] * weight.shape[3])[:columns]
    rows = x.permute(0, 2, 3, 1) if image else x
    tensors = (rows.to(wide), plain.to(wide), bias if bias is None else bias.to(wide))
    product = F.linear(*tensors)
    product = product.permute(0, 3, 1, 2) if image else product
    addend = other if other is None else other.to(wide)
    result = epilogue.apply(product, addend, binary, unary, []).to(x.dtype)
    return result.contiguous(memory_format=_format(image))


@fake(blocked_gemm)
def _(call: Arguments) -> object:
    size = (
        (call.x.shape[0], call.columns, *call.x.shape[2:])
        if call.image
        else (*call.x.shape[:-1], call.columns)
    )
    return call.x.new_empty(size).contiguous(memory_format=_format(call.image))


def pair_size(dtype: torch.dtype) -> int:
    """Return the number of consecutive K elements of a weight that are stored together."""
    return 2 if dtype == torch.bfloat16 else 1


def _format(image: bool) -> torch.memory_format:
    return torch.channels_last if image else torch.contiguous_format


def _shape(weight: Tensor, panel: int) -> tuple[int, int, int, int]:
    paired = pair_size(weight.dtype)
    depth = weight.numel() // weight.shape[0]
    panels = -(-weight.shape[0] // COLUMNS) * (COLUMNS // panel)
    return panels, depth // paired, panel, paired

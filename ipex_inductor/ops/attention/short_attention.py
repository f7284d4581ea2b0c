"""`ipex::short_attention`: attention over few keys on a CPU."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op


@op("short_attention")
def short_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return softmax(q @ k.T * scale + mask) @ v, with zeros where every key is masked.

    Args:
        q: [B, H, Q, D].
        k: [B, H, K, D], of the dtype of q.
        v: [B, H, K, D], of the dtype of q.
        mask: broadcasts to [B, H, Q, K], of the dtype of q.
        causal: True if query i attends to the keys up to i.
        scale: factor of the scores.

    Returns:
        [B, H, Q, D] with the strides of q, as torch's op returns.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask.to(wide)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    masked = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.empty_like(q).copy_(scores.softmax(-1).masked_fill(masked, 0) @ v.to(wide))


@fake(short_attention)
def _(call: Arguments) -> object:
    return torch.empty_like(call.q)

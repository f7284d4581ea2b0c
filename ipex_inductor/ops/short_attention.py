"""`ipex::short_attention`: attention over few keys on a CPU."""

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op


@op("short_attention")
def short_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """softmax(q @ k.T * scale + mask) @ v, zeros where every key is masked.

    q [B, H, Q, D], k and v [B, H, K, D], mask broadcast to [B, H, Q, K], all of one dtype.
    `causal`: query i sees the keys up to i. -> [B, H, Q, D], lying as q, which torch's op has.
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


@short_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    return torch.empty_like(q)

"""`ipex::round_balanced`: weights in 16 bits whose rounding errors cancel in each output channel.

Activations behind a ReLU have positive means. The sum of a channel's rounding errors times that
mean is an error that no averaging over pixels removes. Rounding a few weights to their second
nearest neighbor makes the sum nearly zero: those whose two neighbors are almost equally near.
"""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import light_op

SCHEMA = "round_balanced(Tensor exact, ScalarType dtype, int channels) -> Tensor"
# The sum of K errors deviates by 0.29 sqrt(K) roundings. Candidates are 8 sqrt(K) weights of a
# channel, of which the best sqrt(K) may be changed.
CANDIDATES, CHANGED = 8.0, 1.0


def _fake(exact: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    return torch.empty_like(exact, dtype=dtype)


@light_op(SCHEMA, _fake)
def round_balanced(exact: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """Return a weight in another dtype, its errors balanced in each output channel.

    Args:
        exact: a weight in fp32 or fp64.
        dtype: bf16 or fp16.
        channels: the dimension of the output channels.

    Returns:
        As `exact`, with its strides. A channel with values that are not finite, or beyond the range
        of the dtype, is rounded to nearest.
    """
    result = exact.to(dtype)
    if exact.numel() == 0:
        return result
    others = sorted({*range(exact.dim())} - {channels}, key=exact.stride, reverse=True)
    order = (channels, *others)  # in memory's order a channel is a view of one dimension
    rows, rounded = (x.permute(order).flatten(1) for x in (exact, result))
    sums = (x.sum(1, keepdim=True, dtype=torch.float64) for x in (rounded, rows))
    excess = torch.sub(*sums).float()
    length = rows.shape[1]
    stride = max(1, int(length**0.5 / CANDIDATES))
    candidates = rounded[:, ::stride]
    turned, nearness = _turn(rows[:, ::stride], candidates, excess)
    nearness, places = nearness.topk(min(candidates.shape[1], int(CHANGED * length**0.5) + 1))
    turned, kept = turned.gather(1, places), candidates.gather(1, places)
    steps = (turned.float() - kept.float()).abs()
    reached = steps.cumsum(1) - steps / 2
    chosen = (reached <= excess.abs()) & (nearness > 0)
    balanced = rounded.scatter(1, places * stride, torch.where(chosen, turned, kept))
    restored = balanced.view([exact.shape[d] for d in order])
    return result.copy_(restored.permute([order.index(d) for d in range(exact.dim())]))


def _turn(exact: Tensor, rounded: Tensor, excess: Tensor) -> tuple[Tensor, Tensor]:
    """Return each value's neighbor beyond its exact value, and how near that is.

    Args:
        exact: [channels, candidates].
        rounded: `exact` in 16 bits.
        excess: [channels, 1]: the sum of the errors.

    Returns:
        The neighbors; and the distance to the rounded value as a share of the distance between
        both, at most a half. 0: to take the neighbor would make the excess larger.
    """
    errors = (rounded - exact).float()
    # The next bit pattern is farther from zero, the one before is nearer.
    outward = torch.signbit(rounded) == (excess > 0)
    turned = (rounded.view(torch.int16) + (2 * outward - 1).to(torch.int16)).view(rounded.dtype)
    steps = (turned.float() - rounded.float()).abs()
    usable = (errors * excess > 0) & (rounded != 0) & steps.isfinite() & excess.isfinite()
    return turned, torch.where(usable, errors.abs() / steps, 0.0)

"""`ipex.llm.functional`: compositions of torch's ops, which compiled graphs fuse."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm.attention.indirect_access import (
    indirect_access_kv_cache_attention as indirect_access_kv_cache_attention,
)
from ipex_inductor.llm.lora import bgmv_expand as bgmv_expand
from ipex_inductor.llm.lora import bgmv_expand_slice as bgmv_expand_slice
from ipex_inductor.llm.lora import bgmv_shrink as bgmv_shrink
from ipex_inductor.llm.lora import sgmv_expand as sgmv_expand
from ipex_inductor.llm.lora import sgmv_expand_slice as sgmv_expand_slice
from ipex_inductor.llm.lora import sgmv_shrink as sgmv_shrink


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last dimension, computed in fp32, and scale.

    Args:
        hidden_states: [..., width].
        weight: [width].
        eps: added to the mean square.
    """
    wide = hidden_states.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(hidden_states.dtype)


def fast_layer_norm(
    hidden_states: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Normalize over the last dimensions of shape `normalized_shape`, scale and shift."""
    return F.layer_norm(hidden_states, normalized_shape, weight, bias, eps)


def add_rms_norm(
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    add_back: bool = False,
) -> Tensor:
    """Return the RMS norm of `residual + x`.

    Args:
        residual: added to `x`, None for nothing.
        x: [..., width].
        weight: [width].
        bias: [width], added to the result, or None.
        eps: added to the mean square.
        add_back: write the sum into `residual`.
    """
    normed = rms_norm(_add(residual, x, add_back), weight, eps)
    return normed if bias is None else normed + bias


def add_layer_norm(
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    add_back: bool = False,
) -> Tensor:
    """Return the layer norm of `residual + x`.

    Args:
        residual: added to `x`, None for nothing.
        x: [..., width].
        weight: [width].
        bias: [width] or None.
        eps: added to the variance.
        add_back: write the sum into `residual`.
    """
    total = _add(residual, x, add_back)
    return F.layer_norm(total, (total.shape[-1],), weight, bias, eps)


def _add(residual: Tensor | None, x: Tensor, add_back: bool) -> Tensor:
    if residual is None:
        return x
    return residual.add_(x) if add_back else residual + x


def silu_mul(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Return silu(x) * y, written into `out` if there is one."""
    return _into(out, F.silu(x) * y)


def gelu_mul(x: Tensor, y: Tensor, out: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return gelu(x) * y, written into `out` if there is one.

    Args:
        x: input of the GELU.
        y: factor.
        out: receives the result.
        approximate: "none" or "tanh".
    """
    return _into(out, F.gelu(x, approximate=approximate) * y)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def rotary_embedding(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate `query` and `key` by their positions, in place.

    Args:
        query: [batch, tokens, heads, width] or [tokens, heads, width].
        key: as `query`, with its own number of heads.
        sin: [positions, rotary_dim] or [positions, rotary_dim / 2].
        cos: as `sin`.
        rotary_dim: number of leading elements of a head that are rotated.
        rotary_half: pair each element with the one half of `rotary_dim` behind it; else neighbors.
        position_ids: rows of `sin` and `cos` of the tokens; None if row and token agree.

    Returns:
        `query` and `key`.
    """
    if position_ids is not None:
        sin, cos = sin[position_ids], cos[position_ids]
    sin, cos = (_spread(table, rotary_dim, rotary_half).unsqueeze(-2) for table in (sin, cos))
    for states in (query, key):
        head = states[..., :rotary_dim]
        head.copy_(head * cos + turn_pairs(head, rotary_half) * sin)
    return query, key


def turn_pairs(states: Tensor, half: bool) -> Tensor:
    """Return each pair (a, b) of the last dimension as (-b, a).

    Args:
        states: [..., width].
        half: pairs are one half of the width apart; else they are neighbors.
    """
    if half:
        first, second = states.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-states[..., 1::2], states[..., ::2]), -1).flatten(-2)


def _spread(table: Tensor, rotary_dim: int, half: bool) -> Tensor:
    """Return one entry for each rotated element, from one for each pair."""
    if table.shape[-1] == rotary_dim:
        return table
    return torch.cat((table, table), -1) if half else table.repeat_interleave(2, -1)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    seqlen_q: Tensor,
    seqlen_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    pdropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    return_softmax: bool = False,
    gen_: torch.Generator | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = -1.0,
) -> Tensor:
    """Attend within each of several texts that follow one another, and write into `out`.

    A query that sees no key gets zeros.

    Args:
        query: [tokens of all texts, heads, width].
        key: [keys of all texts, key heads, width].
        value: as `key`.
        out: as `query`; receives the result.
        seqlen_q: [texts + 1], first token of each text, and the number of tokens.
        seqlen_k: [texts + 1], the same of keys.
        alibi_slopes: [heads], times the distance of key and query, or None.
        max_seqlen_q: accepted; the lengths say it.
        max_seqlen_k: accepted; the lengths say it.
        pdropout: must be 0.
        softmax_scale: factor of the scores.
        zero_tensors: accepted; `out` is written as a whole.
        is_causal: hide later keys; the last query and the last key are aligned.
        return_softmax: must be False.
        gen_: accepted; nothing is drawn.
        window_size_left: keys before the query's own that are seen, -1 for all.
        window_size_right: keys behind it that are seen, -1 for all.
        softcap: scores become softcap * tanh(scores / softcap); none below or at 0.

    Raises:
        ArgumentError: for dropout, or if the softmax is requested.
    """
    if pdropout or return_softmax:
        actual = f"pdropout={pdropout}, return_softmax={return_softmax}"
        raise ArgumentError("pdropout=0 and return_softmax=False", actual, "Leave both out.")
    groups = query.shape[1] // key.shape[1]
    ends = zip(seqlen_q.tolist(), seqlen_k.tolist(), strict=True)
    for (q0, k0), (q1, k1) in pairwise(ends):
        q = query[q0:q1].transpose(0, 1).float()
        k, v = (
            each[k0:k1].transpose(0, 1).repeat_interleave(groups, 0).float()
            for each in (key, value)
        )
        scores = q @ k.transpose(1, 2) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(k1 - k0, device=q.device) - (
            torch.arange(q1 - q0, device=q.device)[:, None] + (k1 - k0) - (q1 - q0)
        )
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None].float() * distance.abs()
        right = 0 if is_causal else window_size_right
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if right >= 0:
            hidden = hidden | (distance > right)
        if window_size_left >= 0:
            hidden = hidden | (distance < -window_size_left)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        weights = weights.masked_fill(hidden, 0)  # NaN for a query that sees no key
        out[q0:q1] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out

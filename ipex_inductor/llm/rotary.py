"""Rotary position embeddings as a module with tables of its own."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm import functional


def _scale_linearly(frequencies: Tensor, config: Mapping[str, Any]) -> Tensor:
    return frequencies / float(config["factor"])


def _scale_llama3(frequencies: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend those between."""
    low, high = float(config["low_freq_factor"]), float(config["high_freq_factor"])
    turns = frequencies * float(config["original_max_position_embeddings"]) / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * _scale_linearly(frequencies, config) + kept * frequencies


SCALINGS: dict[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "default": lambda frequencies, config: frequencies,
    "linear": _scale_linearly,
    "llama3": _scale_llama3,
}


class RotaryEmbedding(nn.Module):
    """Rotate queries or keys by their positions.

    Args:
        max_position_embeddings: number of positions in the tables.
        pos_embd_dim: number of elements of a head that are rotated.
        base: base of the frequencies.
        backbone: accepted; `offset` of a call says which elements are paired.
        extra_rope_config: `rope_type` "default", "linear" or "llama3" and its numbers, named as in
            configs of transformers.

    Raises:
        ArgumentError: for another `rope_type`, or if one of its numbers is missing.
    """

    sin: Tensor
    cos: Tensor

    def __init__(
        self,
        max_position_embeddings: int,
        pos_embd_dim: int,
        base: float = 10000,
        backbone: str | None = None,
        extra_rope_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        exponents = torch.arange(0, pos_embd_dim, 2, dtype=torch.float64) / pos_embd_dim
        frequencies = _scale(1.0 / base**exponents, extra_rope_config or {})
        positions = torch.arange(max_position_embeddings, dtype=torch.float64)
        angles = positions[:, None] * frequencies
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self.register_buffer("cos", angles.cos().float(), persistent=False)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        num_head: int,
        head_dim: int,
        offset: int,
        rotary_ndims: int,
        seq_len: int | None = None,
        num_concats: int | None = None,
    ) -> Any:
        """Return `x` rotated.

        Args:
            x: [batch, tokens, num_head * head_dim] or [batch, tokens, num_head, head_dim]; with
                `num_concats` query, key and value behind one another in the last dimension.
            position_ids: [batch, tokens] or [tokens], or one number: the position of the first.
            num_head: heads of `x`, of the query with `num_concats`.
            head_dim: width of a head.
            offset: distance of the elements of a pair: 1, or half of `rotary_ndims`.
            rotary_ndims: number of leading elements of a head that are rotated.
            seq_len: accepted; the tables hold all positions.
            num_concats: 3 for query, key and value in one tensor; the heads of key and value are
                what is left behind the query.

        Returns:
            [batch, tokens, heads, head_dim], or query, key and value as three of these.

        Raises:
            ArgumentError: for shapes that do not go together.
        """
        if offset not in (1, rotary_ndims // 2) or 2 * self.sin.shape[-1] != rotary_ndims:
            expected = f"rotary_ndims={2 * self.sin.shape[-1]} and offset 1 or half of it"
            came = f"rotary_ndims={rotary_ndims}, offset={offset}"
            raise ArgumentError(expected, came, "Pass pos_embd_dim as rotary_ndims.")
        heads = x if x.dim() == 4 else _split_heads(x, head_dim)
        sizes = _count_heads(heads, num_head, num_concats)
        parts = torch.split(heads, sizes, 2)
        sin, cos = (self._rows(table, position_ids, x.shape[1]) for table in (self.sin, self.cos))
        half = offset != 1
        turned = [_rotate(part, sin, cos, rotary_ndims, half) for part in parts[:2]]
        return (*turned, *parts[2:]) if num_concats else turned[0]

    def _rows(self, table: Tensor, position_ids: Tensor, tokens: int) -> Tensor:
        """Return the rows of `table` for each token."""
        if position_ids.numel() == 1 and tokens > 1:
            steps = torch.arange(tokens, device=position_ids.device)
            position_ids = position_ids.flatten() + steps
        return table[position_ids]

    apply_function = staticmethod(functional.rotary_embedding)


def _scale(frequencies: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return frequencies scaled as `rope_type` says.

    Raises:
        ArgumentError: for another `rope_type`, or if one of its numbers is missing.
    """
    name = config.get("rope_type", config.get("type", "default"))
    if name not in SCALINGS:
        advice = "Keep the rotary embedding of the model, which compiled code fuses."
        raise ArgumentError(f"rope_type of {', '.join(SCALINGS)}", repr(name), advice)
    try:
        return SCALINGS[name](frequencies, config)
    except KeyError as error:
        came = f"none in {dict(config)}"
        raise ArgumentError(f"{error} for rope_type {name!r}", came, "Pass it.") from error


def _split_heads(x: Tensor, head_dim: int) -> Tensor:
    if x.shape[-1] % head_dim:
        came = f"{x.shape[-1]} elements a token"
        raise ArgumentError(f"heads of {head_dim} elements", came, "Check head_dim.")
    return x.reshape(*x.shape[:-1], -1, head_dim)


def _count_heads(heads: Tensor, num_head: int, num_concats: int | None) -> list[int]:
    """Return the numbers of heads that `heads` is split into.

    Raises:
        ArgumentError: if they do not go together.
    """
    total = heads.shape[2]
    rest = total - num_head
    if num_concats not in (None, 3) or rest % 2 or (rest > 0) != bool(num_concats):
        came = f"num_head={num_head}, num_concats={num_concats} for {total} heads"
        advice = "Pass num_concats=3 if x holds query, key and value."
        raise ArgumentError("num_head heads in x, or more with num_concats=3", came, advice)
    return [num_head, rest // 2, rest // 2] if num_concats else [num_head]


def _rotate(states: Tensor, sin: Tensor, cos: Tensor, width: int, half: bool) -> Tensor:
    """Return `states` rotated, without a change of them."""
    copy = states.clone()
    functional.rotary_embedding(copy, copy[:, :, :0], sin, cos, width, half)
    return copy

"""Attention written out by hand, as torch's scaled_dot_product_attention.

Inductor has patterns of its own for some of these forms; the ones here are every scale with and
without a mask that is added.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.passes.rule import Constant, Form, Rule, same_size

# How scores of (query, key) are scaled, and what factor that is. Those that scale the query come
# first: what follows the scaling looks like attention without any.
SCALES: dict[str, tuple[Callable[..., Tensor], Callable[[float], float]]] = {
    "q/s@k": (lambda q, k, s: (q / s) @ k.transpose(-1, -2), lambda s: 1 / s),
    "q*s@k": (lambda q, k, s: (q * s) @ k.transpose(-1, -2), lambda s: s),
    "q@k/s": (lambda q, k, s: q @ k.transpose(-1, -2) / s, lambda s: 1 / s),
    "q@k*s": (lambda q, k, s: q @ k.transpose(-1, -2) * s, lambda s: s),
    "q@k": (lambda q, k, _: q @ k.transpose(-1, -2), lambda _: 1.0),
}


def _rule(scaling: str, masked: bool) -> Rule:
    scores, factor = SCALES[scaling]

    def pattern(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        found = scores(q, k, scale)
        return F.softmax(found if mask is None else found + mask, -1) @ v

    def replacement(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=factor(scale))

    needs = {op for op, sign in (("div", "/"), ("mul", "*")) if sign in scaling}
    added = {"add"} if masked else set()
    return Rule(
        equation=f"softmax({scaling}{'+mask' if masked else ''})@v => scaled_dot_product_attention",
        pattern=pattern,
        replacement=replacement,
        forms=tuple(
            Form(
                frozenset({"bmm", *needs, *added}),
                functools.partial(_example, bool(needs), masked, heads_first),
            )
            for heads_first in (True, False)
        ),
        anchor="_softmax",
        when=_is_attention,
    )


def _example(scaled: bool, masked: bool, heads_first: bool) -> dict[str, Any]:
    """q, k, v [2, 3, 5, 7]: as they stand, or as a view of [2, 5, 3, 7]."""

    def heads() -> Tensor:
        return torch.empty(2, 3, 5, 7) if heads_first else torch.empty(2, 5, 3, 7).transpose(1, 2)

    example: dict[str, Any] = {"q": heads(), "k": heads(), "v": heads()}
    if masked:
        example["mask"] = torch.empty(2, 1, 1, 5)
    if scaled:
        example["scale"] = Constant(2.43)
    return example


def _is_attention(values: Mapping[str, Any]) -> str | None:
    q, k, v = (values[name] for name in ("q", "k", "v"))
    tensors = [q, k, v, *([values["mask"]] if "mask" in values else [])]
    if any(t.dtype != q.dtype for t in tensors):
        return "query, key, value and mask differ in dtype"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no fused attention in {q.dtype}"
    if any(t.dim() != 4 for t in (q, k, v)):
        return "query, key and value are not [batch, heads, tokens, width]"
    if not all(map(same_size, (*q.shape[:2], *q.shape[:2]), (*k.shape[:2], *v.shape[:2]))):
        return "query, key and value differ in batch or heads"
    if not isinstance(values.get("scale", 1.0), (int, float)) or values.get("scale") == 0:
        return "the scale is not a number"
    return None


RULES = tuple(_rule(scaling, masked) for scaling in SCALES for masked in (True, False))

"""Recognise fusions in which Inductor's own kernel is already the fastest, and report them.

`benchmarks/studies/left_to_inductor.py` measures each against the library kernels that a fused op
of ours could call; the notes give the result.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.passes.engine.rule import Constant, Form, Rule
from ipex_inductor.passes.fusion.epilogue import Producer, family

ONE_KERNEL = "Inductor's own is one kernel (benchmarks/studies/left_to_inductor.py)"
NO_BATCHED = (
    "oneDNN has no batched product with an epilogue (benchmarks/studies/left_to_inductor.py)"
)
EPS = Constant(0.37)


def _leave(
    name: str,
    pattern: Callable[..., Tensor],
    anchor: str,
    *forms: tuple[set[str], Callable[[], dict[str, Any]]],
) -> Rule:
    return Rule(
        equation=f"{name} => left",
        pattern=pattern,
        replacement=None,
        forms=tuple(Form(frozenset(needs), example) for needs, example in forms),
        anchor=anchor,
        when=_always,
        note=ONE_KERNEL,
    )


def _always(values: Mapping[str, Any]) -> None:
    return None


def _add_layer_norm(
    x: Tensor, y: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    return F.layer_norm(x + y, shape, weight, bias, eps)


def _embedding_layer_norm(
    table: Tensor, tokens: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    return F.layer_norm(F.embedding(tokens, table), shape, weight, bias, eps)


def _affine() -> dict[str, Any]:
    parameters = {"weight": torch.empty(17), "bias": torch.empty(17)}
    return {"shape": Constant([17]), **parameters, "eps": EPS}


def _add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMS norm as language models write it: in fp32, then cast back."""
    hidden = (x + y).to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return weight * (hidden * torch.rsqrt(variance + eps)).to(x.dtype)


def _rms_example(dtype: torch.dtype) -> dict[str, Any]:
    x, y, weight = (torch.empty(*shape, 17, dtype=dtype) for shape in ((2, 5), (2, 5), ()))
    return {"x": x, "y": y, "weight": weight, "eps": EPS}


def _div_add_softmax(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    return F.softmax(scores / scale + mask, -1)


def _shuffle(x: Tensor, grouped: list[int], order: list[int], shape: list[int]) -> Tensor:
    return x.view(grouped).permute(order).contiguous().view(shape)


BMM = Producer(
    name="bmm",
    product=torch.baddbmm,
    op=None,
    fused=lambda *epilogue, **arguments: (),
    forms=(
        Form(
            frozenset({"baddbmm"}),
            lambda: {
                "input": torch.empty(3, 1, 7),
                "batch1": torch.empty(3, 5, 17),
                "batch2": torch.empty(3, 17, 7),
            },
        ),
    ),
    when=_always,
    weights=(),
    note=NO_BATCHED,
)

RULES = (
    _leave(
        "add + layer_norm",
        _add_layer_norm,
        "native_layer_norm",
        ({"add"}, lambda: {"x": torch.empty(2, 5, 17), "y": torch.empty(2, 5, 17), **_affine()}),
    ),
    _leave(
        "embedding + layer_norm",
        _embedding_layer_norm,
        "native_layer_norm",
        (
            {"embedding"},
            lambda: {
                "table": torch.empty(9, 17),
                "tokens": torch.zeros(2, 5, dtype=torch.long),
                **_affine(),
            },
        ),
    ),
    _leave(
        "add + rms_norm",
        _add_rms_norm,
        "rsqrt",
        *(
            ({"mean", "pow"}, functools.partial(_rms_example, dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ),
    ),
    _leave(
        "div + add + softmax",
        _div_add_softmax,
        "_softmax",
        (
            {"div", "add"},
            lambda: {
                "scores": torch.empty(2, 3, 5, 5),
                "mask": torch.empty(2, 1, 1, 5),
                "scale": Constant(2.43),
            },
        ),
    ),
    _leave(
        "view + transpose + contiguous + view",
        _shuffle,
        "clone",
        (
            {"view", "permute"},
            lambda: {
                "x": torch.empty(2, 34, 5, 7),
                "grouped": Constant([2, 2, 17, 5, 7]),
                "order": Constant([0, 2, 1, 3, 4]),
                "shape": Constant([2, 34, 5, 7]),
            },
        ),
    ),
    *family(BMM),
)

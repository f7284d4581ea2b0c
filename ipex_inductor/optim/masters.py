"""Casting the parameters of a model, with full precision kept where training needs it."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim.shards import is_sharded
from ipex_inductor.optim.step import refuse_differentiable, wrap
from ipex_inductor.optim.tables import SPLIT_OPTIMIZERS, names
from ipex_inductor.optim.weights import (
    Master,
    Rounded,
    Split,
    Trained,
    Weight,
    find_shards,
    place,
    unplaced,
    weights_of,
)

DTYPES = (torch.bfloat16, torch.float16)


@torch.no_grad()
def attach_master_weights(
    model: nn.Module,
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    dtype: torch.dtype,
    *,
    split: bool,
) -> None:
    """Cast `parameters` of `model` (fp32) to `dtype`, in place, and have `optimizer` train fp32.

    `split` (bf16 alone): the upper 16 bits of each weight in the parameter, the lower 16 beside it.
    Otherwise bf16 or fp16 in the parameter and fp32 beside it. State dicts of the model and of its
    submodules hold fp32, as does the optimizer's state. fp16 parameters get fp32 gradients, which
    `GradScaler` needs and `DistributedDataParallel` refuses. Attached again, what is held otherwise
    is cast anew. After `fully_shard` (FSDP2) the optimizer steps the shards, from its next call on;
    FSDP1 and parametrizations applied afterwards make steps raise. Optimizers beyond
    `SPLIT_OPTIMIZERS` evaluate closures themselves, as often as they like. Averages of weights
    are to be taken of state dicts (see `ipex_inductor.optim`). Raises `ArgumentError`.
    """
    _check_optimizer(optimizer, dtype, split)
    kind = Split if split else Master
    find_shards()
    known, asked = weights_of(model), list(parameters)
    _refuse_sharded(asked, known, kind, dtype)
    asked = _check_parameters(model, asked, known)
    weights = {p: _attach(p, known.get(p), kind, dtype) for p in asked}
    place(model, unplaced(model) | weights)
    wrap(optimizer, weights)


def cast_for_inference(
    model: nn.Module, parameters: Iterable[nn.Parameter], dtype: torch.dtype
) -> dict[nn.Parameter, torch.dtype]:
    """Cast `parameters` of `model` to `dtype`; its state dicts go on holding the dtypes they had.

    Cast twice, they show the first; after `model.half()` or the like, what that made of them. What
    has master weights is held in its own low precision, and left alone. Returns the dtype that each
    one had which was cast.
    """
    known, cast = weights_of(model), {}
    for param in parameters:
        weight, had = known.get(param), param.dtype
        if not isinstance(weight, Trained) and had != dtype:
            param.grad = None  # of another dtype than the gradients to come
            param.data = param.data.to(dtype)
            public = weight.public if isinstance(weight, Rounded) else had
            known[param], cast[param] = Rounded(param, dtype, public), had
    place(model, {p: known[p] for p in cast})
    return cast


def _attach(
    param: nn.Parameter, weight: Weight | None, kind: type[Trained], dtype: torch.dtype
) -> Trained:
    if isinstance(weight, Trained):
        if weight.is_a(kind, dtype):
            return weight
        weight.restore()
    return kind(param, dtype)


def _refuse_sharded(
    params: Iterable[nn.Parameter],
    known: dict[nn.Parameter, Weight],
    kind: type[Trained],
    dtype: torch.dtype,
) -> None:
    for param in filter(is_sharded, params):
        weight = known.get(param)
        if not isinstance(weight, Trained) or not weight.is_a(kind, dtype):
            raise ArgumentError(
                f"parameters that are not sharded yet, or are held as {kind.__name__} already",
                f"a DTensor of {param.dtype}",
                "Attach master weights first, then call fully_shard: the optimizer steps shards.",
            )


def _check_optimizer(optimizer: Optimizer, dtype: torch.dtype, split: bool) -> None:
    if dtype not in DTYPES or (split and dtype != torch.bfloat16):
        wanted = "torch.bfloat16" if split else "torch.bfloat16 or torch.float16"
        raise ArgumentError(wanted, str(dtype), "Split weights are halves of fp32: bf16 alone.")
    if split and type(optimizer) not in SPLIT_OPTIMIZERS:
        came = f"a {type(optimizer).__name__}"
        raise ArgumentError(
            f"one of {names(SPLIT_OPTIMIZERS)}, exactly", came, "Others train with split=False."
        )
    if isinstance(optimizer, LBFGS):
        raise ArgumentError(
            "an optimizer that evaluates its closure once a step",
            "LBFGS",
            "It changes parameters while it evaluates the loss: leave the model in fp32.",
        )

    if "_optimizer_step_pre_hooks" not in vars(optimizer) or not hasattr(
        type(optimizer).step, "__wrapped__"
    ):
        raise ArgumentError(
            "an optimizer whose __init__ calls that of torch.optim.Optimizer",
            f"a {type(optimizer).__name__}",
            "If it wraps another optimizer, pass that one, and wrap what comes back.",
        )
    refuse_differentiable(optimizer)


def _check_parameters(
    model: nn.Module, parameters: Iterable[nn.Parameter], known: dict[nn.Parameter, Weight]
) -> list[nn.Parameter]:
    """Each parameter once; all checked before the first is cast."""
    asked, owned = list(dict.fromkeys(parameters)), set(model.parameters())
    for param in asked:
        trained = isinstance(known.get(param), Trained)
        plain = type(param.data) is torch.Tensor and param.dtype == torch.float32
        if param not in owned or not (trained or plain):
            raise ArgumentError(
                "ordinary fp32 parameters of the model",
                f"a {type(param).__name__} of {param.dtype}"
                + " that is none of the model's" * (param not in owned),
                "Give the model as it was before any cast: the lower bits are needed.",
            )
    return asked

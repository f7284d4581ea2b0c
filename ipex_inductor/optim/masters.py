"""Cast the parameters of a model, and keep full precision where training needs it."""

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
    find_unplaced,
    place,
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
    """Cast `parameters` of `model` (fp32) to `dtype` in place, and have `optimizer` train fp32.

    State dicts of the model and of its submodules hold fp32, as does the optimizer's state. fp16
    parameters get fp32 gradients, which `GradScaler` needs and `DistributedDataParallel` refuses. A
    second call casts again what is held in another way. After `fully_shard` (FSDP2) the optimizer
    steps the shards, from its next call on; FSDP1 and parametrizations applied afterwards make
    steps raise. Optimizers beyond `SPLIT_OPTIMIZERS` evaluate closures themselves, as often as
    they need. Average weights by state dicts (see `ipex_inductor.optim`).

    Args:
        model: the module that owns `parameters`.
        optimizer: the optimizer that steps them.
        parameters: fp32 parameters of `model`, or ones with master weights already.
        dtype: `torch.bfloat16` or `torch.float16`.
        split: keep the upper 16 bits of each weight in the parameter and the lower 16 bits beside
            it (bf16 alone). Otherwise keep bf16 or fp16 in the parameter and fp32 beside it.

    Raises:
        ArgumentError: the optimizer, the dtype or a parameter is not supported.
    """
    _check_optimizer(optimizer, dtype, split)
    kind = Split if split else Master
    find_shards()
    held_weights, params = weights_of(model), list(parameters)
    _refuse_sharded(params, held_weights, kind, dtype)
    params = _check_parameters(model, params, held_weights)
    weights = {p: _attach(p, held_weights.get(p), kind, dtype) for p in params}
    place(model, find_unplaced(model) | weights)
    wrap(optimizer, weights)


def cast_for_inference(
    model: nn.Module, parameters: Iterable[nn.Parameter], dtype: torch.dtype
) -> dict[nn.Parameter, torch.dtype]:
    """Cast `parameters` of `model` to `dtype`, while its state dicts keep their dtypes.

    After two casts, state dicts show the first dtype; after `model.half()` or the like, the dtype
    that it gave. Parameters with master weights are left in their own low precision.

    Returns:
        The old dtype of each parameter that was cast.
    """
    held_weights, cast_dtypes = weights_of(model), {}
    for param in parameters:
        weight, old_dtype = held_weights.get(param), param.dtype
        if not isinstance(weight, Trained) and old_dtype != dtype:
            param.grad = None  # its dtype differs from that of new gradients
            param.data = param.data.to(dtype)
            public = weight.public if isinstance(weight, Rounded) else old_dtype
            held_weights[param], cast_dtypes[param] = Rounded(param, dtype, public), old_dtype
    place(model, {p: held_weights[p] for p in cast_dtypes})
    return cast_dtypes


def _attach(
    param: nn.Parameter, weight: Weight | None, kind: type[Trained], dtype: torch.dtype
) -> Trained:
    """Return the weight that holds `param` as `kind` in `dtype`; another one is restored first."""
    if isinstance(weight, Trained):
        if weight.is_a(kind, dtype):
            return weight
        weight.restore()
    return kind(param, dtype)


def _refuse_sharded(
    params: Iterable[nn.Parameter],
    held_weights: dict[nn.Parameter, Weight],
    kind: type[Trained],
    dtype: torch.dtype,
) -> None:
    """Raise `ArgumentError` for a DTensor that is not held as `kind` already."""
    for param in filter(is_sharded, params):
        weight = held_weights.get(param)
        if not isinstance(weight, Trained) or not weight.is_a(kind, dtype):
            raise ArgumentError(
                f"parameters that are not sharded yet, or are held as {kind.__name__} already",
                f"a DTensor of {param.dtype}",
                "Attach master weights first, then call fully_shard: the optimizer steps shards.",
            )


def _check_optimizer(optimizer: Optimizer, dtype: torch.dtype, split: bool) -> None:
    """Raise `ArgumentError` if `optimizer` cannot train such master weights."""
    if dtype not in DTYPES or (split and dtype != torch.bfloat16):
        accepted = "torch.bfloat16" if split else "torch.bfloat16 or torch.float16"
        raise ArgumentError(accepted, str(dtype), "Split weights are halves of fp32: bf16 alone.")
    if split and type(optimizer) not in SPLIT_OPTIMIZERS:
        actual = f"a {type(optimizer).__name__}"
        raise ArgumentError(
            f"one of {names(SPLIT_OPTIMIZERS)}, exactly", actual, "Others train with split=False."
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
    model: nn.Module, parameters: Iterable[nn.Parameter], held_weights: dict[nn.Parameter, Weight]
) -> list[nn.Parameter]:
    """Return each parameter once, after all have been checked.

    Raises `ArgumentError` for one that is not an ordinary fp32 parameter of `model`.
    """
    params, model_params = list(dict.fromkeys(parameters)), set(model.parameters())
    for param in params:
        trained = isinstance(held_weights.get(param), Trained)
        plain = type(param.data) is torch.Tensor and param.dtype == torch.float32
        if param not in model_params or not (trained or plain):
            raise ArgumentError(
                "ordinary fp32 parameters of the model",
                f"a {type(param).__name__} of {param.dtype}"
                + " that is none of the model's" * (param not in model_params),
                "Give the model as it was before any cast: the lower bits are needed.",
            )
    return params

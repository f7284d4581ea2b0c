"""The memory of a parameter and of all that its step reads and writes, as a kernel takes it."""

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from ipex_inductor.optim.shards import is_sharded, local
from ipex_inductor.optim.weights import Master, Split, Trained
from ipex_inductor.templates.optimizer.formulas import FORMULAS
from ipex_inductor.templates.optimizer.step import C_TYPES
from ipex_inductor.templates.optimizer.step_cpp import is_dense
from ipex_inductor.templates.optimizer.step_cuda import has_kernels

RESTS: dict[type[Trained], torch.dtype] = {Split: torch.int16, Master: torch.float32}
NAMES = {getattr(torch, name): name for name in C_TYPES}
REALS = {dtype: name for dtype, name in NAMES.items() if dtype.is_floating_point}


class LeftError(Exception):  # no error: a parameter goes another way
    """Why a parameter is left to the optimizer's own step."""


def held_of(param: nn.Parameter) -> Tensor:
    """The memory of `param`, for a kernel; raises `LeftError` if it is not one dense block."""
    held = local(param) if is_sharded(param) else param.detach()
    if type(held) is not Tensor:
        raise LeftError(f"a {type(held).__name__}")
    if not has_kernels(held.device):
        raise LeftError(f"no kernel for {held.device.type} yet")
    if held.dtype not in REALS:
        raise LeftError(f"{held.dtype}")
    if not is_dense(held):
        raise LeftError("a parameter with gaps in its memory")
    if held.is_neg():
        raise LeftError("a parameter that is negated when it is read")
    if not _has_memory(held):
        raise LeftError("a parameter without memory of its own")
    return held


def rest_of(weight: Trained, held: Tensor) -> list[Tensor]:
    """What `held` cannot hold, in its layout; raises `LeftError` for another."""
    rest = local(weight.rest)
    if rest.dtype != RESTS.get(type(weight)) or not _alike(rest, held):
        raise LeftError("a master weight of another layout")
    return [rest]


def grad_of(grad: Tensor, held: Tensor) -> Tensor:
    """The gradient, in the layout of the parameter: a copy, if it has another.

    Raises `LeftError` for one that no kernel reads.
    """
    if grad.layout is not torch.strided:
        raise LeftError("sparse gradients")
    grad = (local(grad) if is_sharded(grad) else grad.detach()).resolve_neg()
    if type(grad) is not Tensor or grad.dtype not in REALS or grad.device != held.device:
        raise LeftError(f"gradients that are a {type(grad).__name__} of {grad.dtype}")
    if (held.dtype is torch.float64) != (grad.dtype is torch.float64):
        raise LeftError(f"gradients of {grad.dtype} for {held.dtype}")
    if not _has_memory(grad):
        raise LeftError("gradients without memory of their own")
    return grad if _alike(grad, held) else torch.empty_like(held, dtype=grad.dtype).copy_(grad)


def known_state(
    optimizer: Optimizer, param: nn.Parameter, names: tuple[str, ...], held: Tensor
) -> dict[str, Tensor]:
    """What the formula reads of the state of `param`; nothing if that is to be made.

    Raises `LeftError` for a state that a kernel cannot take, or that lacks something.
    """
    counts = FORMULAS[type(optimizer).__name__].counts
    own = optimizer.state.get(param, {})
    known = {n: own[n] for n in (*["step"] * counts, *names) if own.get(n) is not None}
    if not known and type(optimizer) is not Adagrad and (not counts or not own):
        return {}
    if len(known) != len(names) + counts:
        raise LeftError("a state that lacks what the step reads")
    for name, value in known.items():
        if not isinstance(value, Tensor):
            raise LeftError(f"a state {name!r} that is a {type(value).__name__}")
        tensor = local(value)
        places = (held.device, torch.device("cpu")) if name == "step" else (held.device,)
        if tensor.device not in places or tensor.dtype not in REALS:
            raise LeftError(f"a state {name!r} of {tensor.dtype} on {tensor.device}")
        odd = tensor.is_neg() or not _has_memory(tensor)
        if name != "step" and (odd or not _alike(tensor, held)):
            raise LeftError(f"a state {name!r} of another layout")
    return known


def _has_memory(tensor: Tensor) -> bool:
    """A functional tensor has none, though it looks like any other."""
    return not tensor.numel() or bool(tensor.data_ptr())


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (
        one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())
    )

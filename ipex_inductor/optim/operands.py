"""Memory of a parameter and of all tensors that its step reads and writes, as kernels take it."""

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


class LeftError(Exception):  # not a failure: the parameter is stepped in another way
    """The reason why a parameter is left to the optimizer's own step."""


def held_of(param: nn.Parameter) -> Tensor:
    """Return the memory of `param` for kernels; raises `LeftError` unless it is one dense block."""
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
    """Return the lower bits or the master weight of `weight`, in the layout of `held`.

    Raises `LeftError` for another layout.
    """
    rest = local(weight.rest)
    if rest.dtype != RESTS.get(type(weight)) or not _same_layout(rest, held):
        raise LeftError("a master weight of another layout")
    return [rest]


def grad_of(grad: Tensor, held: Tensor) -> Tensor:
    """Return the gradient in the layout of the parameter; one in another layout is copied.

    Raises `LeftError` for a gradient that no kernel reads.
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
    if _same_layout(grad, held):
        return grad
    return torch.empty_like(held, dtype=grad.dtype).copy_(grad)


def known_state(
    optimizer: Optimizer, param: nn.Parameter, names: tuple[str, ...], held: Tensor
) -> dict[str, Tensor]:
    """Return the state of `param` that the formula reads; an empty one if it is still to be made.

    Raises `LeftError` for a state that a kernel cannot take or that lacks a tensor.
    """
    counts = FORMULAS[type(optimizer).__name__].counts
    param_state = optimizer.state.get(param, {})
    state = {
        n: param_state[n] for n in (*["step"] * counts, *names) if param_state.get(n) is not None
    }
    if not state and type(optimizer) is not Adagrad and (not counts or not param_state):
        return {}
    if len(state) != len(names) + counts:
        raise LeftError("a state that lacks what the step reads")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise LeftError(f"a state {name!r} that is a {type(value).__name__}")
        tensor = local(value)
        devices = (held.device, torch.device("cpu")) if name == "step" else (held.device,)
        if tensor.device not in devices or tensor.dtype not in REALS:
            raise LeftError(f"a state {name!r} of {tensor.dtype} on {tensor.device}")
        unusable = tensor.is_neg() or not _has_memory(tensor)
        if name != "step" and (unusable or not _same_layout(tensor, held)):
            raise LeftError(f"a state {name!r} of another layout")
    return state


def _has_memory(tensor: Tensor) -> bool:
    """Return whether `tensor` has memory; a functional tensor has none."""
    return not tensor.numel() or bool(tensor.data_ptr())


def _same_layout(first: Tensor, second: Tensor) -> bool:
    """Return whether shapes are equal, and strides too unless both tensors are contiguous."""
    return first.shape == second.shape and (
        first.stride() == second.stride() or (first.is_contiguous() and second.is_contiguous())
    )

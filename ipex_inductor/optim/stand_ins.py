"""PyTorch's own step of low-precision parameters, on temporary fp32 copies.

torch does the arithmetic, exactly as for fp32 parameters: a chunk of parameters at a time is joined
to fp32, stepped and split again.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.optim import kernels
from ipex_inductor.optim.shards import is_sharded, local
from ipex_inductor.optim.weights import Trained
from ipex_inductor.templates.optimizer.formulas import FORMULAS

CHUNK = 2**22  # elements in fp32 at a time: 16 MiB, and 16 MiB for their gradients


def step_in_chunks(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    plain: Callable[..., Any],
    only: Container[nn.Parameter] | None = None,
) -> None:
    """Run `plain`, the step of the optimizer's class, chunk by chunk; see `_chunks`."""
    # The largest chunk comes first: if memory is too short for it, nothing has been written.
    chunks = sorted(_chunks(optimizer, weights, only), key=_elements, reverse=True)
    if len(chunks) > 1:
        _rehearse(optimizer, weights, [p for chunk in chunks for p in chunk])
    rooms = [_room(optimizer, weights, chunk) for chunk in chunks]
    for chunk, room in zip(chunks, rooms, strict=True):
        room.clear()
        with _stand_ins(optimizer, chunk, weights):
            plain(optimizer)


def whole_step(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    plain: Callable[..., Any],
    closure: Callable[[], Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `plain` on all parameters at once; it evaluates `closure` as often as it needs.

    For the loss, the model gets the weights as `plain` has changed them so far.

    Args:
        optimizer: the wrapped optimizer.
        weights: master weights by parameter.
        plain: the step to run.
        closure: recomputes and returns the loss, or None.
        args: further positional arguments of `plain`.
        kwargs: further keyword arguments of `plain`.

    Returns:
        The result of `plain`.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    with _stand_ins(optimizer, params, weights) as fulls:

        def evaluate() -> Any:
            assert closure is not None
            with torch.no_grad():
                for param, full in fulls.items():
                    weights[param].store(full)
            with _swap_params(optimizer, {fulls.get(p, p): p for p in params}):
                loss = closure()
            for param, full in fulls.items():
                full.grad = _wide_grad(param)
            return loss

        closure_args = () if closure is None else (evaluate,)
        return plain(*closure_args, *args, **kwargs)


def _chunks(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    only: Container[nn.Parameter] | None,
) -> Iterator[list[nn.Parameter]]:
    """Yield lists of parameters with gradients, at most CHUNK elements of `weights` each.

    A list has at least one parameter. With `only`, other parameters are skipped. This is for
    optimizers that are known to step each parameter independently.
    """
    chunk: list[nn.Parameter] = []
    size = 0
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        if param.grad is None or (only is not None and param not in only):
            continue
        added = local(param).numel() if param in weights else 0
        if size and size + added > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(param)
        size += added
    if chunk:
        yield chunk


def _elements(chunk: list[nn.Parameter]) -> int:
    """Return the number of elements of a chunk; 0 if it has DTensors.

    Processes meet for norms of DTensors in the order of the groups, so these chunks are not sorted.
    """
    return 0 if any(map(is_sharded, chunk)) else sum(param.numel() for param in chunk)


def _room(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], chunk: list[nn.Parameter]
) -> list[Tensor]:
    """Return memory as large as the states that a first step of `chunk` allocates.

    It is held until that step, so that memory cannot run out after earlier chunks were written. It
    is no more than the final size of all states.
    """
    rule, stepped = FORMULAS[type(optimizer).__name__], set(chunk)
    room: list[Tensor] = []
    for group in optimizer.param_groups:
        count = len(rule.state(frozenset(name for name in rule.flags if group.get(name))))
        for param in group["params"]:
            if param in stepped and param not in optimizer.state:
                dtype = torch.float32 if param in weights else param.dtype
                room += (torch.empty_like(local(param), dtype=dtype) for _ in range(count))
    return room


def _rehearse(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], params: list[nn.Parameter]
) -> None:
    """Step tensors without elements, so that torch refuses a group before anything is written.

    There is one tensor for each kind of `params` in a group, with a state like theirs.
    """
    kernels.refuse_sparse(optimizer, [p.grad for p in params if p.grad is not None])
    state, stepped = optimizer.state, set(params)
    empty: dict[nn.Parameter, Tensor] = {}
    for group in optimizer.param_groups:
        kinds: dict[tuple[torch.dtype, torch.device], nn.Parameter] = {}
        for param in group["params"]:
            if param in stepped:
                dtype = torch.float32 if param in weights else param.dtype
                kinds.setdefault((dtype, local(param).device), param)
        for (dtype, device), param in kinds.items():
            empty[param] = torch.empty(0, dtype=dtype, device=device)
            empty[param].grad = torch.empty_like(empty[param])
    try:
        for param, placeholder in empty.items():
            if param in state:
                state[placeholder] = {
                    name: _empty_state(name, v) for name, v in state[param].items()
                }
        with _swap_params(optimizer, empty):
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    finally:
        for placeholder in empty.values():
            state.pop(placeholder, None)


def _empty_state(name: str, value: Any) -> Any:
    """Return an empty tensor for a state; the step counter is copied."""
    if not isinstance(value, Tensor):
        return value
    return local(value).clone() if name == "step" else local(value).new_empty(0)


@contextmanager
def _stand_ins(
    optimizer: Optimizer, chunk: list[nn.Parameter], weights: Mapping[nn.Parameter, Trained]
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Have `optimizer` step `chunk` alone while open, with fp32 copies for `weights` among it."""
    state = optimizer.state
    with torch.no_grad():
        fulls = {p: _full(p, weights[p]) for p in chunk if p in weights}
    try:
        with _swap_params(optimizer, {p: fulls.get(p, p) for p in chunk}):
            for param, full in fulls.items():
                if param in state:
                    state[full] = state[param]
            yield fulls
        with torch.no_grad():
            for param, full in fulls.items():
                weights[param].store(full)
    finally:
        for param, full in fulls.items():
            if full in state:
                state[param] = state.pop(full)


@contextmanager
def _swap_params(optimizer: Optimizer, replacements: Mapping[Any, Any]) -> Iterator[None]:
    """Have groups hold `replacements[p]` for each p while open, and no other parameters."""
    old_params = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [replacements[p] for p in group["params"] if p in replacements]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, old_params, strict=True):
            group["params"] = params


def _full(param: nn.Parameter, weight: Trained) -> Tensor:
    """Return the weight in fp32 with its gradient in fp32."""
    full = weight.full().detach()
    full.grad = _wide_grad(param)
    return full


def _wide_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient of `param` upcast to fp32, or None."""
    return None if param.grad is None else param.grad.to(torch.float32)

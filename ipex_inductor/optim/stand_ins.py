"""PyTorch's own step of parameters in low precision, on fp32 stand-ins.

It does the arithmetic, and so exactly as it would for fp32 parameters: a chunk of parameters at a
time is put together, stepped and cut again.
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

CHUNK = 2**22  # elements that are fp32 at a time, 16 MiB, and as much for their gradients


def step_in_chunks(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    plain: Callable[..., Any],
    only: Container[nn.Parameter] | None = None,
) -> None:
    """`plain`, the step of the optimizer's class, on a chunk after the other; see `_chunks`."""
    # The largest first: where memory is short for it, nothing is written.
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
    """`plain` on all parameters at once; it evaluates `closure` when, and as often as, it likes.

    For the loss the model takes over what `plain` made of the weights until then.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    with _stand_ins(optimizer, params, weights) as fulls:

        def evaluate() -> Any:
            assert closure is not None
            with torch.no_grad():
                for param, full in fulls.items():
                    weights[param].store(full)
            with _swapped(optimizer, {fulls.get(p, p): p for p in params}):
                loss = closure()
            for param, full in fulls.items():
                full.grad = _wide_grad(param)
            return loss

        given = () if closure is None else (evaluate,)
        return plain(*given, *args, **kwargs)


def _chunks(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    only: Container[nn.Parameter] | None,
) -> Iterator[list[nn.Parameter]]:
    """Parameters with a gradient, at most CHUNK elements of `weights` at a time, but one at least.

    Of those in `only`, if that is given. For optimizers that are known to treat each parameter by
    itself.
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
    """0 with DTensors, for whose norms processes meet in the order of the groups."""
    return 0 if any(map(is_sharded, chunk)) else sum(param.numel() for param in chunk)


def _room(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], chunk: list[nn.Parameter]
) -> list[Tensor]:
    """Memory as a first step takes it for the states that it keeps of `chunk`.

    Held until then, so that none is short after chunks before it were written; it is no more than
    all of them have in the end.
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
    """A step of tensors without elements: what torch refuses of a group it refuses before a write.

    One for each kind of `params` in a group, with such a state as theirs.
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
        for param, nothing in empty.items():
            if param in state:
                state[nothing] = {name: _emptied(name, v) for name, v in state[param].items()}
        with _swapped(optimizer, empty):
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    finally:
        for nothing in empty.values():
            state.pop(nothing, None)


def _emptied(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return local(value).clone() if name == "step" else local(value).new_empty(0)


@contextmanager
def _stand_ins(
    optimizer: Optimizer, chunk: list[nn.Parameter], weights: Mapping[nn.Parameter, Trained]
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """While open, `chunk` is all the optimizer knows, and `weights` among it are fp32 tensors."""
    state = optimizer.state
    with torch.no_grad():
        fulls = {p: _full(p, weights[p]) for p in chunk if p in weights}
    try:
        with _swapped(optimizer, {p: fulls.get(p, p) for p in chunk}):
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
def _swapped(optimizer: Optimizer, now: Mapping[Any, Any]) -> Iterator[None]:
    """While open, groups have `now[p]` for p, and nothing for others."""
    held = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [now[p] for p in group["params"] if p in now]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, held, strict=True):
            group["params"] = params


def _full(param: nn.Parameter, weight: Trained) -> Tensor:
    """The weight in fp32 with the gradient in fp32."""
    full = weight.full().detach()
    full.grad = _wide_grad(param)
    return full


def _wide_grad(param: nn.Parameter) -> Tensor | None:
    return None if param.grad is None else param.grad.to(torch.float32)

"""Which kernels step which tensors of an optimizer, and which tensors are left to its own step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ipex_inductor.optim.alias_check import overlapping
from ipex_inductor.optim.launch_groups import Batch
from ipex_inductor.optim.launch_groups_cpu import CpuBatch
from ipex_inductor.optim.launch_groups_cuda import CountingBatch, CudaBatch, rate_on
from ipex_inductor.optim.launch_groups_sycl import SyclBatch
from ipex_inductor.optim.operands import (
    NAMES,
    REALS,
    LeftError,
    grad_of,
    held_of,
    known_state,
    rest_of,
)
from ipex_inductor.optim.plan import Plan
from ipex_inductor.optim.sharded_norms import Key, agree, shares_of
from ipex_inductor.optim.shards import is_sharded, local, same_places
from ipex_inductor.optim.weights import Trained, refuse_strangers
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.optimizer.formulas import FORMULAS, Formula
from ipex_inductor.templates.optimizer.step import StepKernel
from ipex_inductor.templates.optimizer.step_cuda import VECTOR
from ipex_inductor.templates.tensor_reader.step_counters import DTYPES, is_whole


def plan(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    scaled: bool = False,
    zeroed: bool = False,
    waits: bool = True,
) -> Plan:
    """What a step of `optimizer` is now, with the state that torch would have made for it.

    Unless the host `waits`, GPUs make scalars, of what it need not read. Raises `ArgumentError` for
    parameters with master weights that the optimizer does not know.
    """
    refuse_strangers(optimizer)
    norms = FORMULAS[type(optimizer).__name__].norms
    made = Plan(shares=shares_of(optimizer, len(norms)) if norms else {})
    missed: dict[Key | None, str] = {}  # what others, on that mesh, may have kernels for
    shared = overlapping(_written(optimizer, weights))
    for number, group in enumerate(optimizer.param_groups):
        try:
            flags = flags_of(optimizer, group)
            if len(set(group["params"])) < len(group["params"]):
                raise LeftError("a group that has a parameter twice")
        except LeftError as reason:
            made.left |= {p: str(reason) for p in group["params"] if p.grad is not None}
            continue
        for param in group["params"]:
            if param.grad is None:
                continue
            try:
                if param in shared:
                    raise LeftError("parameters or states that share memory")
                _add(made, optimizer, number, flags, param, weights, scaled, zeroed, waits)
            except (LeftError, NotBuiltError) as reason:
                made.left[param] = str(reason)
                made.unbuilt |= {str(reason)} if isinstance(reason, NotBuiltError) else set()
                missed.setdefault(_adds_to(made, param), str(reason))
    agreed = [agree(optimizer, key, each, missed.get(key)) for key, each in made.shares.items()]
    return made if all(agreed) else plan(optimizer, weights, scaled, zeroed, waits)


def _adds_to(made: Plan, param: Any) -> Key | None:
    """The shares that are to have the sums of `param`, if it has a gradient that is cut alike."""
    keys = (key for key, shares in made.shares.items() if param in shares)
    return next(keys, None) if same_places(param, param.grad) else None


def _written(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """What a step may write, and whose it is."""
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        yield param, param
        if param in weights:
            yield param, weights[param].rest
        for value in optimizer.state.get(param, {}).values():
            if isinstance(value, Tensor):
                yield param, value


def flags_of(optimizer: Optimizer, group: Mapping[str, Any]) -> frozenset[str]:
    """Which of the formula's flags are on; raises `LeftError` for a group that no kernel takes."""
    if group.get("differentiable"):
        raise LeftError("differentiable=True")
    for beta in group.get("betas", ()):
        if isinstance(beta, Tensor):
            raise LeftError("betas that are tensors")
    on = [name for name in FORMULAS[type(optimizer).__name__].flags if group.get(name)]
    if type(optimizer) is AdamW:
        on.append("decoupled_weight_decay")
    return frozenset(on)


def _add(
    made: Plan,
    optimizer: Optimizer,
    number: int,
    flags: frozenset[str],
    param: nn.Parameter,
    weights: Mapping[nn.Parameter, Trained],
    scaled: bool,
    zeroed: bool,
    waits: bool,
) -> None:
    name, group = type(optimizer).__name__, optimizer.param_groups[number]
    rule, weight = FORMULAS[name], weights.get(param)
    assert param.grad is not None
    held = held_of(param)
    _refuse(rule, group, param, held)
    adds_to = _sums_of(made, rule, param)
    rest = rest_of(weight, held) if weight else []
    grad = grad_of(param.grad, held)
    names = rule.state(flags)
    known = known_state(optimizer, param, names, held)
    fresh = torch.float32 if rest else held.dtype
    step = known["step"].dtype if "step" in known else _step_dtype(group)
    dtypes = [held.dtype, rest[0].dtype if rest else None, grad.dtype]
    states = [known[n].dtype if n in known else fresh for n in names]
    kernel = _kernel(name, flags, dtypes, states, step, scaled, zeroed, adds_to is not None)
    first = bool(names) and not known
    if first:
        counted = {"step": _begun_step(group, held, step)} if rule.counts else {}
        known = counted | {n: torch.zeros_like(param, dtype=fresh).detach() for n in names}
    columns = [held, *rest, grad, *(local(known[n]) for n in names)]
    looks = not waits or rate_on(group, held.device) is not None
    last = known.get("step")
    batch = _batch(made, kernel, columns, number, last, first, looks)
    if first:
        made.fresh[param] = known
    made.grads.append((batch.rows, len(batch.rows) + 1 + len(rest)))
    places = made.shares[adds_to].places(param) if adds_to else []
    addresses = [*(t.data_ptr() for t in columns), *places]
    batch.add(addresses, held.numel(), last, first, number)
    made.held += columns
    made.written += [p for p in columns if p is not grad or zeroed]
    made.written += [known["step"]] if rule.counts else []
    if grad.data_ptr() != local(param.grad).data_ptr():
        made.copied.append(param.grad)


def _refuse(rule: Formula, group: Mapping[str, Any], param: nn.Parameter, held: Tensor) -> None:
    """Raise `LeftError` where others count the steps, or the gradient is cut otherwise."""
    if not held.is_cuda and group.get("capturable"):
        raise LeftError(f"capturable=True on a device of type {held.device.type}")
    if held.device.type == "xpu" and rule.counts and group.get("fused"):
        raise LeftError("fused=True, whose steps torch counts on the GPU")
    if is_sharded(param) and not same_places(param, param.grad):
        raise LeftError("gradients that are distributed otherwise than their parameters")


def _sums_of(made: Plan, rule: Formula, param: nn.Parameter) -> Key | None:
    """The shares that are to have its sums, if it is cut and the formula has norms of it."""
    if not (rule.norms and is_sharded(param)):
        return None
    adds_to = _adds_to(made, param)
    if adds_to is None:
        raise LeftError("norms of whole tensors, of which other processes hold parts")
    return adds_to


def _kernel(
    name: str,
    flags: frozenset[str],
    dtypes: Sequence[torch.dtype | None],
    states: Sequence[torch.dtype],
    step: torch.dtype,
    scaled: bool,
    zeroed: bool,
    sharded: bool,
) -> StepKernel:
    """`dtypes`: of the parameter, of what it cannot hold, of the gradient."""
    param, rest, grad = (NAMES[dtype] if dtype else "" for dtype in dtypes)
    return StepKernel(
        formula=name,
        flags=tuple(sorted(flags)),
        param=param,
        rest=rest,
        grad=grad,
        state=tuple(map(NAMES.__getitem__, states)),
        counted=NAMES[step] if FORMULAS[name].counts else "",
        scaled=scaled,
        zeroed=zeroed,
        sharded=sharded,
    )


def expected(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], scaled: bool, zeroed: bool
) -> dict[StepKernel, list[Mapping[str, Any]]]:
    """The kernels of a first step, each with the groups that have it, wherever parameters will be.

    Gradients are taken to have their parameter's dtype. What no kernel takes is not among them.
    """
    found: dict[StepKernel, list[Mapping[str, Any]]] = {}
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        with suppress(LeftError):
            flags = flags_of(optimizer, group)
            for param in group["params"]:
                if param.dtype not in REALS or not param.requires_grad:
                    continue
                rest = weights[param].rest.dtype if param in weights else None
                fresh = torch.float32 if rest else param.dtype
                states = [fresh] * len(FORMULAS[name].state(flags))
                dtypes = [param.dtype, rest, param.dtype]
                sharded = bool(FORMULAS[name].norms) and is_sharded(param)
                kinds = flags, dtypes, states, _step_dtype(group)
                having = found.setdefault(_kernel(name, *kinds, scaled, zeroed, sharded), [])
                if not any(group is each for each in having):
                    having.append(group)
    return found


def _batch(
    made: Plan,
    kernel: StepKernel,
    columns: list[Tensor],
    group: int,
    step: Tensor | None,
    first: bool,
    looks: bool,
) -> Batch:
    """Where a parameter belongs; `looks`: a GPU makes its scalars, though the host may count."""
    device = columns[0].device
    if device.type == "cpu":
        return _made(made, CpuBatch, kernel)
    if device.type == "xpu":
        return _made(made, SyclBatch, kernel, device, group, _far(step, first))
    aligned = not any(t.data_ptr() % VECTOR for t in columns)
    if step is not None and step.is_cuda:
        return _made(made, CountingBatch, kernel, device, aligned)
    far = _far(step, first)
    if looks and is_whole(far):
        return _made(made, CountingBatch, kernel, device, aligned, None if step is None else far)
    return _made(made, CudaBatch, kernel, device, aligned, group, far)


def _far(step: Tensor | None, first: bool) -> float:
    """How many steps were before this one, or whether it is the first; of those the host counts."""
    if step is None:
        return float(first)
    if step.device.type != "cpu":
        raise LeftError(f"steps that lie on {step.device.type}")
    if NAMES.get(step.dtype) not in DTYPES:
        raise LeftError(f"steps counted in {step.dtype}")
    return float(step)


def _made(made: Plan, kind: type[Batch], *which: Any) -> Batch:
    if (kind, *which) not in made.batches:
        made.batches[kind, *which] = kind(*which)
    return made.batches[kind, *which]


def _step_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """As torch makes it."""
    double = torch.get_default_dtype() is torch.float64 and not group.get("fused")
    return torch.float64 if double else torch.float32


def _begun_step(group: Mapping[str, Any], held: Tensor, dtype: torch.dtype) -> Tensor:
    """No step yet, where torch would count them."""
    there = held.is_cuda and (group.get("capturable") or group.get("fused"))
    return torch.zeros((), dtype=dtype, device=held.device if there else torch.device("cpu"))

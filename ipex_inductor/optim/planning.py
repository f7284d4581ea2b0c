"""Plans of steps: kernels with the tensors they step, and tensors left to the optimizer itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ipex_inductor.optim.alias_check import find_overlapping
from ipex_inductor.optim.launching.launch_groups import Batch
from ipex_inductor.optim.launching.launch_groups_cpu import CpuBatch
from ipex_inductor.optim.launching.launch_groups_cuda import CountingBatch, CudaBatch, rate_on
from ipex_inductor.optim.launching.launch_groups_sycl import SyclBatch
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


@dataclass(frozen=True)
class _StepOptions:
    """Options of a step; see `plan`."""

    scaled: bool
    zeroed: bool
    waits: bool = True


def plan(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    scaled: bool = False,
    zeroed: bool = False,
    waits: bool = True,
) -> Plan:
    """Return the plan of the next step of `optimizer`, with the states that torch would create.

    Args:
        optimizer: the fused optimizer.
        weights: master weights by parameter.
        scaled: whether gradients are multiplied by a scale.
        zeroed: whether kernels set gradients to 0.
        waits: whether the host waits for the scale. Otherwise GPUs compute scalars, from tensors
            that the host need not read.

    Raises:
        ArgumentError: a parameter has a master weight that the optimizer does not know.
    """
    refuse_strangers(optimizer)
    norms = FORMULAS[type(optimizer).__name__].norms
    options = _StepOptions(scaled, zeroed, waits)
    step_plan = Plan(shares=shares_of(optimizer, len(norms)) if norms else {})
    reasons: dict[Key | None, str] = {}  # by mesh, where other processes may have kernels
    shared = find_overlapping(_iter_written(optimizer, weights))
    for number, group in enumerate(optimizer.param_groups):
        try:
            flags = flags_of(optimizer, group)
            if len(set(group["params"])) < len(group["params"]):
                raise LeftError("a group that has a parameter twice")
        except LeftError as reason:
            step_plan.left |= {p: str(reason) for p in group["params"] if p.grad is not None}
            continue
        for param in group["params"]:
            if param.grad is None:
                continue
            try:
                if param in shared:
                    raise LeftError("parameters or states that share memory")
                _add(step_plan, optimizer, number, flags, param, weights, options)
            except (LeftError, NotBuiltError) as reason:
                step_plan.left[param] = str(reason)
                step_plan.unbuilt |= {str(reason)} if isinstance(reason, NotBuiltError) else set()
                reasons.setdefault(_adds_to(step_plan, param), str(reason))
    meshes = step_plan.shares.items()
    agreed = [agree(optimizer, key, shares, reasons.get(key)) for key, shares in meshes]
    return step_plan if all(agreed) else plan(optimizer, weights, scaled, zeroed, waits)


def _adds_to(step_plan: Plan, param: Any) -> Key | None:
    """Return the key of the shares that sum norms of `param`, if its gradient is cut like it."""
    keys = (key for key, shares in step_plan.shares.items() if param in shares)
    return next(keys, None) if same_places(param, param.grad) else None


def _iter_written(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each tensor that a step may write, with the parameter that owns it."""
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        yield param, param
        if param in weights:
            yield param, weights[param].rest
        for value in optimizer.state.get(param, {}).values():
            if isinstance(value, Tensor):
                yield param, value


def flags_of(optimizer: Optimizer, group: Mapping[str, Any]) -> frozenset[str]:
    """Return the formula's flags that are on; raises `LeftError` for an unsupported group."""
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
    step_plan: Plan,
    optimizer: Optimizer,
    number: int,
    flags: frozenset[str],
    param: nn.Parameter,
    weights: Mapping[nn.Parameter, Trained],
    options: _StepOptions,
) -> None:
    """Add `param` and its tensors to a batch of the plan.

    Args:
        step_plan: the plan to extend.
        optimizer: the fused optimizer.
        number: index of the parameter group.
        flags: flags of the formula that are on.
        param: the parameter; it has a gradient.
        weights: master weights by parameter.
        options: whether gradients are scaled and zeroed, and whether the host waits.

    Raises:
        LeftError: no kernel steps the parameter.
        NotBuiltError: the kernel cannot be built.
    """
    name, group = type(optimizer).__name__, optimizer.param_groups[number]
    rule, weight = FORMULAS[name], weights.get(param)
    assert param.grad is not None
    held = held_of(param)
    _refuse(rule, group, param, held)
    adds_to = _sums_of(step_plan, rule, param)
    rest = rest_of(weight, held) if weight else []
    grad = grad_of(param.grad, held)
    names = rule.state(flags)
    state = known_state(optimizer, param, names, held)
    fresh = torch.float32 if rest else held.dtype
    step = state["step"].dtype if "step" in state else _step_dtype(group)
    dtypes = [held.dtype, rest[0].dtype if rest else None, grad.dtype]
    states = [state[n].dtype if n in state else fresh for n in names]
    kernel = _kernel(name, flags, dtypes, states, step, options, adds_to is not None)
    first = bool(names) and not state
    if first:
        counted = {"step": _begun_step(group, held, step)} if rule.counts else {}
        state = counted | {n: torch.zeros_like(param, dtype=fresh).detach() for n in names}
    columns = [held, *rest, grad, *(local(state[n]) for n in names)]
    looks = not options.waits or rate_on(group, held.device) is not None
    counter = state.get("step")
    batch = _batch(step_plan, kernel, columns, number, counter, first, looks)
    if first:
        step_plan.fresh[param] = state
    step_plan.grads.append((batch.rows, len(batch.rows) + 1 + len(rest)))
    norm_addresses = step_plan.shares[adds_to].places(param) if adds_to else []
    addresses = [*(t.data_ptr() for t in columns), *norm_addresses]
    batch.add(addresses, held.numel(), counter, first, number)
    step_plan.held += columns
    step_plan.written += [p for p in columns if p is not grad or options.zeroed]
    step_plan.written += [state["step"]] if rule.counts else []
    if grad.data_ptr() != local(param.grad).data_ptr():
        step_plan.copied.append(param.grad)


def _refuse(rule: Formula, group: Mapping[str, Any], param: nn.Parameter, held: Tensor) -> None:
    """Raise `LeftError` if kernels cannot count the steps, or the gradient is cut differently."""
    if not held.is_cuda and group.get("capturable"):
        raise LeftError(f"capturable=True on a device of type {held.device.type}")
    if held.device.type == "xpu" and rule.counts and group.get("fused"):
        raise LeftError("fused=True, whose steps torch counts on the GPU")
    if is_sharded(param) and not same_places(param, param.grad):
        raise LeftError("gradients that are distributed otherwise than their parameters")


def _sums_of(step_plan: Plan, rule: Formula, param: nn.Parameter) -> Key | None:
    """Return the key of the shares that sum norms of `param`, or None if it needs none.

    Raises `LeftError` if its norms cannot be summed over processes.
    """
    if not (rule.norms and is_sharded(param)):
        return None
    adds_to = _adds_to(step_plan, param)
    if adds_to is None:
        raise LeftError("norms of whole tensors, of which other processes hold parts")
    return adds_to


def _kernel(
    name: str,
    flags: frozenset[str],
    dtypes: Sequence[torch.dtype | None],
    states: Sequence[torch.dtype],
    step: torch.dtype,
    options: _StepOptions,
    sharded: bool,
) -> StepKernel:
    """Return the description of the kernel that steps a parameter.

    Args:
        name: name of the formula.
        flags: flags of the formula that are on.
        dtypes: of the parameter, of its low bits or master weight (or None), of the gradient.
        states: dtypes of the states.
        step: dtype of the step counter.
        options: whether gradients are scaled and zeroed.
        sharded: whether norms are summed over processes.
    """
    param, rest, grad = (NAMES[dtype] if dtype else "" for dtype in dtypes)
    return StepKernel(
        formula=name,
        flags=tuple(sorted(flags)),
        param=param,
        rest=rest,
        grad=grad,
        state=tuple(map(NAMES.__getitem__, states)),
        counted=NAMES[step] if FORMULAS[name].counts else "",
        scaled=options.scaled,
        zeroed=options.zeroed,
        sharded=sharded,
    )


def list_kernels(
    optimizer: Optimizer, weights: Mapping[nn.Parameter, Trained], scaled: bool, zeroed: bool
) -> dict[StepKernel, list[Mapping[str, Any]]]:
    """Return the kernels of a first step with their groups, whatever device parameters will be on.

    Gradients are assumed to have the dtypes of their parameters. Parameters that no kernel takes
    are skipped.
    """
    groups_by_kernel: dict[StepKernel, list[Mapping[str, Any]]] = {}
    name, options = type(optimizer).__name__, _StepOptions(scaled, zeroed)
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
                kernel = _kernel(name, *kinds, options, sharded)
                kernel_groups = groups_by_kernel.setdefault(kernel, [])
                if not any(group is listed for listed in kernel_groups):
                    kernel_groups.append(group)
    return groups_by_kernel


def _batch(
    step_plan: Plan,
    kernel: StepKernel,
    columns: list[Tensor],
    group: int,
    step: Tensor | None,
    first: bool,
    looks: bool,
) -> Batch:
    """Return the batch that steps a parameter.

    Args:
        step_plan: the plan; it gets a new batch if none fits.
        kernel: the step kernel.
        columns: memory of the parameter, its low bits or master weight, gradient and states.
        group: index of the parameter group.
        step: step counter, or None if steps are not counted.
        first: whether this is the first step.
        looks: whether a GPU computes the scalars, even if the host counts the steps.
    """
    device = columns[0].device
    if device.type == "cpu":
        return _find_batch(step_plan, CpuBatch, kernel)
    if device.type == "xpu":
        return _find_batch(
            step_plan, SyclBatch, kernel, device, group, count_steps_before(step, first)
        )
    aligned = not any(t.data_ptr() % VECTOR for t in columns)
    if step is not None and step.is_cuda:
        return _find_batch(step_plan, CountingBatch, kernel, device, aligned)
    steps_before = count_steps_before(step, first)
    if looks and is_whole(steps_before):
        return _find_batch(
            step_plan,
            CountingBatch,
            kernel,
            device,
            aligned,
            None if step is None else steps_before,
        )
    return _find_batch(step_plan, CudaBatch, kernel, device, aligned, group, steps_before)


def count_steps_before(step: Tensor | None, first: bool) -> float:
    """Return the number of steps before this one; without a counter, whether it is the first.

    Raises `LeftError` for a counter that the host cannot read.
    """
    if step is None:
        return float(first)
    if step.device.type != "cpu":
        raise LeftError(f"steps that lie on {step.device.type}")
    if NAMES.get(step.dtype) not in DTYPES:
        raise LeftError(f"steps counted in {step.dtype}")
    return float(step)


def _find_batch(step_plan: Plan, kind: type[Batch], *arguments: Any) -> Batch:
    """Return the batch of `kind` with these arguments, which is created once a plan."""
    if (kind, *arguments) not in step_plan.batches:
        step_plan.batches[kind, *arguments] = kind(*arguments)
    return step_plan.batches[kind, *arguments]


def _step_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which torch counts the steps of `group`."""
    double = torch.get_default_dtype() is torch.float64 and not group.get("fused")
    return torch.float64 if double else torch.float32


def _begun_step(group: Mapping[str, Any], held: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a step counter of 0 on the device where torch would count the steps."""
    counts_on_device = held.is_cuda and (group.get("capturable") or group.get("fused"))
    device = held.device if counts_on_device else torch.device("cpu")
    return torch.zeros((), dtype=dtype, device=device)

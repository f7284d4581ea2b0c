"""Which kernels step which tensors of an optimizer, and which tensors are left to its own step."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, AdamW, Optimizer

from ipex_inductor.optim.batches import Batch, Scale
from ipex_inductor.optim.batches_cpu import CpuBatch
from ipex_inductor.optim.batches_cuda import CountingBatch, CudaBatch, rate_on
from ipex_inductor.optim.batches_sycl import SyclBatch
from ipex_inductor.optim.shards import is_sharded, local, same_places
from ipex_inductor.optim.shares import Key, Shares, agree, shares_of
from ipex_inductor.optim.weights import Master, Split, Trained, refuse_strangers
from ipex_inductor.templates.cells import DTYPES
from ipex_inductor.templates.cpp import NotBuiltError
from ipex_inductor.templates.formulas import FORMULAS
from ipex_inductor.templates.look_cpp import bump
from ipex_inductor.templates.step import C_TYPES, StepKernel
from ipex_inductor.templates.step_cpp import is_dense
from ipex_inductor.templates.step_cuda import VECTOR, has_kernels

RESTS: dict[type[Trained], torch.dtype] = {Split: torch.int16, Master: torch.float32}
NAMES = {getattr(torch, name): name for name in C_TYPES}
REALS = {dtype: name for dtype, name in NAMES.items() if dtype.is_floating_point}


class LeftError(Exception):  # no error: a parameter goes another way
    """Why a parameter is left to the optimizer's own step."""


@dataclass
class Plan:
    """One step: kernels with what they take, and whom the optimizer's own step is to take.

    `held` and `written` are let go when the kernels have run.
    """

    batches: dict[tuple[Any, ...], Batch] = field(default_factory=dict)  # by kernel, and device
    left: dict[nn.Parameter, str] = field(default_factory=dict)
    unbuilt: set[str] = field(default_factory=set)  # of the reasons, those that a user may mend
    written: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # alive until the kernels have run
    copied: list[Tensor] = field(default_factory=list)  # gradients of which kernels get copies
    fresh: dict[nn.Parameter, dict[str, Tensor]] = field(default_factory=dict)  # states to begin
    grads: list[tuple["array[int]", int]] = field(default_factory=list)  # where addresses stand
    shares: dict[Key, Shares] = field(default_factory=dict)  # of norms that other processes add to
    _columns: "list[Column] | None" = None

    @property
    def lasts(self) -> bool:
        """Whether it holds for the next step, if nothing but gradients' addresses changes."""
        return not (self.left or self.fresh or self.copied)

    @property
    def as_far(self) -> bool:
        """Whether steps that the host counts are where this left them."""
        for batch in self.batches.values():  # before each step
            if isinstance(batch, (CudaBatch, SyclBatch)) and not batch.as_far():
                return False
        return True

    def move(self, addresses: "array[int]") -> None:
        """Gradients lie there now."""
        if self._columns is None:
            self._columns = _columns(self.grads)
        for rows, places, numbers in self._columns:
            whole = len(numbers) == len(addresses)
            rows[places] = addresses if whole else array("q", [addresses[n] for n in numbers])

    def looks_itself(self, scale: Scale) -> bool:
        """Whether the host need not read any tensor of `scale`: one GPU reads and counts alone."""
        devices = {t.device for t in scale.tensors}
        counting = all(isinstance(b, CountingBatch) for b in self.batches.values())
        devices |= {b.device for b in self.batches.values() if isinstance(b, CountingBatch)}
        return counting and self.lasts and len(devices) == 1


# Of a table of addresses: where the gradients' stand, and which of all gradients they are.
Column = tuple["array[int]", slice, list[int]]


def _columns(grads: list[tuple["array[int]", int]]) -> list[Column]:
    tables: dict[int, tuple[array[int], list[int], list[int]]] = {}
    for number, (rows, place) in enumerate(grads):
        _, places, numbers = tables.setdefault(id(rows), (rows, [], []))
        places.append(place)
        numbers.append(number)
    return [  # rows of one table are of one width
        (rows, slice(places[0], None, len(rows) // len(places)), numbers)
        for rows, places, numbers in tables.values()
    ]


def plan(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    scaled: bool = False,
    zeroed: bool = False,
    waits: bool = True,
) -> Plan:
    """What a step of `optimizer` is now, with the state that torch would have made for it.

    Unless it `waits`, the host is not to read anything that is on a GPU. Raises `ArgumentError` for
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


def overlapping(owned: Iterable[tuple[Any, Tensor]]) -> set[Any]:
    """The owners of tensors that lie in one another's memory."""
    found: set[Any] = set()
    reached, by = 0, None
    spans = sorted((*_span(tensor), n, owner) for n, (owner, tensor) in enumerate(owned))
    for begin, end, _, owner in spans:
        if begin < reached:
            found |= {by, owner}
        if end > reached:
            reached, by = end, owner
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    held = local(tensor) if is_sharded(tensor) else tensor
    plain = type(held) in (Tensor, nn.Parameter) and held.layout is torch.strided
    if not plain or not held.numel():
        return 0, 0
    reach = sum(n * stride - stride for n, stride in zip(held.shape, held.stride(), strict=True))
    return held.data_ptr(), held.data_ptr() + (reach + 1) * held.element_size()


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


def numbers_of(made: Plan, optimizer: Optimizer, scale: Scale) -> list["array[float]"]:
    """What each kernel is given of the groups; raises what a number that is none raises."""
    return [batch.numbers(optimizer.param_groups, scale) for batch in made.batches.values()]


def run(made: Plan, optimizer: Optimizer, numbers: list["array[float]"], scale: Scale) -> None:
    """Step all that is not left; what was fresh is not any more."""
    for batch in made.batches.values():  # memory may be short: before anything is handed over
        batch.prepare()
    if len(made.batches) != 1:  # several kernels, of which none could do it in passing
        scale.written()
    for param, state in made.fresh.items():
        optimizer.state[param].update(state)
    given = [*zip(made.batches.values(), numbers, strict=True)]
    if made.shares:
        for batch, its in given:
            batch.take_norms(its, scale)
        for shares in made.shares.values():
            shares.add_up()
    for batch, its in given:
        batch.run(its, scale)
    bump(made.written)
    made.held, made.written, made.fresh = [], [], {}


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
    held = _held(param)
    if not held.is_cuda and group.get("capturable"):
        raise LeftError(f"capturable=True on a device of type {held.device.type}")
    if held.device.type == "xpu" and rule.counts and group.get("fused"):
        raise LeftError("fused=True, whose steps torch counts on the GPU")
    if is_sharded(param) and not same_places(param, param.grad):
        raise LeftError("gradients that are distributed otherwise than their parameters")
    adds_to = _adds_to(made, param) if rule.norms and is_sharded(param) else None
    if rule.norms and is_sharded(param) and adds_to is None:
        raise LeftError("norms of whole tensors, of which other processes hold parts")
    rest = _rest(weight, held) if weight else []
    grad = _grad(param.grad, held)
    names = rule.state(flags)
    known = _known_state(optimizer, param, names, held)
    fresh = torch.float32 if rest else held.dtype
    step = known["step"].dtype if "step" in known else _step_dtype(group)
    dtypes = [held.dtype, rest[0].dtype if rest else None, grad.dtype]
    states = [known[n].dtype if n in known else fresh for n in names]
    kernel = _kernel(name, flags, dtypes, states, step, scaled, zeroed, adds_to is not None)
    first = bool(names) and not known
    if first:
        there = held.is_cuda and (group.get("capturable") or group.get("fused"))
        place = held.device if there else torch.device("cpu")
        known = {"step": torch.zeros((), dtype=step, device=place)} if rule.counts else {}
        known |= {n: torch.zeros_like(param, dtype=fresh).detach() for n in names}
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
) -> dict[StepKernel, Mapping[str, Any]]:
    """The kernels of a first step, each with a group that has it, wherever parameters will be.

    Gradients are taken to have their parameter's dtype. What no kernel takes is not among them.
    """
    found: dict[StepKernel, Mapping[str, Any]] = {}
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
                found[_kernel(name, *kinds, scaled, zeroed, sharded)] = group
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
    """Where a parameter belongs; `looks`: a GPU does, though it has no steps to count."""
    device = columns[0].device
    if device.type == "cpu":
        return _made(made, CpuBatch, kernel)
    if device.type == "xpu":
        return _made(made, SyclBatch, kernel, device, group, _far(step, first))
    aligned = not any(t.data_ptr() % VECTOR for t in columns)
    if looks if step is None else step.is_cuda:
        return _made(made, CountingBatch, kernel, device, aligned)
    return _made(made, CudaBatch, kernel, device, aligned, group, _far(step, first))


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


def _held(param: nn.Parameter) -> Tensor:
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


def _rest(weight: Trained, held: Tensor) -> list[Tensor]:
    rest = local(weight.rest)
    if rest.dtype != RESTS.get(type(weight)) or not _alike(rest, held):
        raise LeftError("a master weight of another layout")
    return [rest]


def _grad(grad: Tensor, held: Tensor) -> Tensor:
    """The gradient, in the layout of the parameter: a copy, if it has another."""
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


def _known_state(
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


def _step_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """As torch makes it."""
    double = torch.get_default_dtype() is torch.float64 and not group.get("fused")
    return torch.float64 if double else torch.float32


def _has_memory(tensor: Tensor) -> bool:
    """A functional tensor has none, though it looks like any other."""
    return not tensor.numel() or bool(tensor.data_ptr())


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (
        one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())
    )

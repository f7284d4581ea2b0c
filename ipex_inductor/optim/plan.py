"""Which kernels step which tensors of an optimizer, and which tensors are left to its own step."""

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, AdamW, Optimizer

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.optim.shards import is_sharded, local, same_places
from ipex_inductor.optim.weights import Master, Split, Trained
from ipex_inductor.templates.cpp import NotBuiltError, load
from ipex_inductor.templates.formulas import FORMULAS
from ipex_inductor.templates.step import C_TYPES, StepKernel, cpp_source

CHUNK = 1 << 16  # elements that one thread takes at a time
ALONE = 1 << 15  # elements in all, up to which one thread is faster than several
RESTS: dict[type[Trained], torch.dtype] = {Split: torch.int16, Master: torch.float32}
NAMES = {getattr(torch, name): name for name in C_TYPES}
REALS = {dtype: name for dtype, name in NAMES.items() if dtype.is_floating_point}


class LeftError(Exception):  # no error: a parameter goes another way
    """Why a parameter is left to the optimizer's own step."""


@dataclass
class Batch:
    """The parameters of one kernel."""

    call: Callable[..., None]
    rows: "array[int]" = field(default_factory=lambda: array("q"))
    chunks: "array[int]" = field(default_factory=lambda: array("q"))
    count: int = 0
    elements: int = 0

    def add(self, row: list[int], elements: int) -> None:
        """One more parameter: its addresses, its step's (or whether this is the first), group."""
        for begin in range(0, elements, CHUNK):
            self.chunks.extend((self.count, begin, min(begin + CHUNK, elements)))
        self.rows.extend(row)
        self.count += 1
        self.elements += elements


@dataclass
class Plan:
    """One step: kernels with what they take, and whom the optimizer's own step is to take.

    `held` and `written` are let go when the kernels have run.
    """

    kernels: dict[StepKernel, Batch] = field(default_factory=dict)
    left: dict[nn.Parameter, str] = field(default_factory=dict)
    unbuilt: set[str] = field(default_factory=set)  # of the reasons, those that a user may mend
    written: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # alive until the kernels have run
    copied: list[Tensor] = field(default_factory=list)  # gradients of which kernels get copies
    fresh: dict[nn.Parameter, dict[str, Tensor]] = field(default_factory=dict)  # states to begin
    grads: list[tuple["array[int]", int]] = field(default_factory=list)  # where addresses stand

    @property
    def lasts(self) -> bool:
        """Whether it holds for the next step, if nothing but gradients' addresses changes."""
        return not (self.left or self.fresh or self.copied)


def plan(
    optimizer: Optimizer,
    weights: Mapping[nn.Parameter, Trained],
    scaled: bool = False,
    zeroed: bool = False,
) -> Plan:
    """What a step of `optimizer` is now, with the state that torch would have made for it."""
    made = Plan()
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
                _add(made, optimizer, group, number, flags, param, weights, scaled, zeroed)
            except LeftError as reason:
                made.left[param] = str(reason)
            except NotBuiltError as error:
                made.left[param] = str(error)
                made.unbuilt.add(str(error))
    return made


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


def numbers_of(made: Plan, optimizer: Optimizer, scale: float) -> list["array[float]"]:
    """What each kernel is given of the groups; raises what a number that is none raises."""
    return [
        array("d", (n for g in optimizer.param_groups for n in _numbers(g, kernel.numbers, scale)))
        for kernel in made.kernels
    ]


def run(made: Plan, optimizer: Optimizer, numbers: list["array[float]"]) -> None:
    """Step all that is not left."""
    for param, state in made.fresh.items():
        optimizer.state[param].update(state)
    for batch, given in zip(made.kernels.values(), numbers, strict=True):
        batch.call(
            batch.rows.buffer_info()[0],
            batch.count,
            batch.chunks.buffer_info()[0],
            len(batch.chunks) // 3,
            given.buffer_info()[0],
            torch.get_num_threads() if batch.elements > ALONE else 1,
        )
    torch.autograd.graph.increment_version(made.written)
    made.held, made.written = [], []


def library(kernel: StepKernel) -> Callable[..., None]:
    """The function of that kernel. Raises `NotBuiltError`."""
    found = _library(kernel)
    if isinstance(found, str):
        raise NotBuiltError(found)
    return found


@functools.lru_cache(maxsize=256)
def _library(kernel: StepKernel) -> Callable[..., None] | str:
    """Or why there is none: what failed once would cost every step as much."""
    try:
        step = load(functools.partial(cpp_source, kernel), pairs(kernel.problem)).step
    except NotBuiltError as error:
        return str(error)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    step.argtypes = (pointer, number, pointer, number, pointer, number)
    step.restype = None
    return step


def flags_of(optimizer: Optimizer, group: Mapping[str, Any]) -> frozenset[str]:
    """Which of the formula's flags are on; raises `LeftError` for a group that no kernel takes."""
    for name in ("differentiable", "capturable"):
        if group.get(name):
            raise LeftError(f"{name}=True")
    if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
        raise LeftError("betas that are tensors")
    on = {name for name in FORMULAS[type(optimizer).__name__].flags if group.get(name)}
    if type(optimizer) is AdamW:
        on.add("decoupled_weight_decay")
    return frozenset(on)


def _add(
    made: Plan,
    optimizer: Optimizer,
    group: dict[str, Any],
    number: int,
    flags: frozenset[str],
    param: nn.Parameter,
    weights: Mapping[nn.Parameter, Trained],
    scaled: bool,
    zeroed: bool,
) -> None:
    name = type(optimizer).__name__
    rule, weight = FORMULAS[name], weights.get(param)
    assert param.grad is not None
    held = _held(param)
    if is_sharded(param):
        if rule.norms:
            raise LeftError("norms of whole tensors, of which other processes hold parts")
        if not same_places(param, param.grad):
            raise LeftError("gradients that are distributed otherwise than their parameters")
    rest = _rest(weight, held) if weight else []
    grad = _grad(param.grad, held)
    names = rule.state(flags)
    known = _known_state(optimizer, param, names, held)
    fresh = torch.float32 if rest else held.dtype
    step = known["step"].dtype if "step" in known else _step_dtype(group)
    kernel = StepKernel(
        formula=name,
        flags=tuple(sorted(flags)),
        param=NAMES[held.dtype],
        rest=NAMES[rest[0].dtype] if rest else "",
        grad=NAMES[grad.dtype],
        state=tuple(NAMES[known[n].dtype if n in known else fresh] for n in names),
        counted=NAMES[step] if rule.counts else "",
        scaled=scaled,
        zeroed=zeroed,
    )
    if kernel not in made.kernels:
        made.kernels[kernel] = Batch(library(kernel))
    first = bool(names) and not known
    if first:
        known = {"step": torch.tensor(0.0, dtype=step, device="cpu")} if rule.counts else {}
        known |= {n: torch.zeros_like(param, dtype=fresh).detach() for n in names}
        made.fresh[param] = known
    columns = [held, *rest, grad, *(local(known[n]) for n in names)]
    last = known["step"].data_ptr() if rule.counts else int(first)
    batch = made.kernels[kernel]
    made.grads.append((batch.rows, len(batch.rows) + 1 + len(rest)))
    batch.add([*(t.data_ptr() for t in columns), last, number], held.numel())
    made.held += columns
    made.written += [p for p in columns if p is not grad or zeroed]
    made.written += [known["step"]] if rule.counts else []
    if grad.data_ptr() != param.grad.data_ptr():
        made.copied.append(param.grad)


def _held(param: nn.Parameter) -> Tensor:
    """The memory of `param`, for a kernel; raises `LeftError` if it is not one dense block."""
    held = local(param) if is_sharded(param) else param.detach()
    if type(held) is not Tensor:
        raise LeftError(f"a {type(held).__name__}")
    if held.device.type != "cpu":
        raise LeftError(f"no kernel for {held.device.type} yet")
    if held.dtype not in REALS:
        raise LeftError(f"{held.dtype}")
    if not _is_dense(held):
        raise LeftError("a parameter with gaps in its memory")
    if held.is_neg():
        raise LeftError("a parameter that is negated when it is read")
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
        if tensor.device != held.device or tensor.dtype not in REALS:
            raise LeftError(f"a state {name!r} of {tensor.dtype} on {tensor.device}")
        if name != "step" and (not _alike(tensor, held) or tensor.is_neg()):
            raise LeftError(f"a state {name!r} of another layout")
    return known


def _step_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """As torch makes it."""
    double = torch.get_default_dtype() is torch.float64 and not group.get("fused")
    return torch.float64 if double else torch.float32


def _numbers(group: Mapping[str, Any], names: tuple[str, ...], scale: float) -> list[float]:
    betas = group.get("betas", (0.0, 0.0))
    found = {**group, "beta1": betas[0], "beta2": betas[1], "scale": scale}
    return [float(found.get(name, 0.0)) for name in names]


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (
        one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a block of memory, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

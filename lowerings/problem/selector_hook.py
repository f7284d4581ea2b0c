"""Whose kernel an op gets, where Inductor has a list of them: a record's choice, or the library's.

Inductor calls `_one` with every such list. Outside of `choosing` it comes back as it was, so that
nothing changes for what plain Inductor compiles in the same process.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.autotune import space
from ipex_inductor.autotune.record import Choice, Problem, encode
from ipex_inductor.lowerings.problem.settings import settings_of
from ipex_inductor.lowerings.problem.spaces import TRITON_PARAMETERS
from ipex_inductor.lowerings.problem.workload import problem_of
from ipex_inductor.target import device as target

aten = torch.ops.aten

# What may have more than one kernel.
OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
}


@dataclass
class Offer:
    """What Inductor listed for one problem, in its order; the first of a name counts.

    `times`: how many nodes ask it, of an op of ours.
    """

    problem: Problem
    choices: tuple[Choice, ...]
    taken: Choice
    times: int = 1


@dataclass(frozen=True)
class Heard:
    """What Inductor timed of one problem, in milliseconds; infinite where it failed."""

    problem: Problem
    device: torch.device
    times: tuple[tuple[Choice, float], ...]


@dataclass
class Choosing:
    """What is to be chosen while one graph is lowered, and what was offered.

    `leaves`: lists of which there can be no record stay Inductor's to decide; with `watches` all
    do, and `heard` is what it timed.
    """

    selected: Mapping[bytes, Choice] = field(default_factory=dict)
    leaves: bool = False
    watches: bool = False
    offers: dict[bytes, Offer] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)
    # By id of a choice of Inductor's, which is kept so that the id stays its own.
    watched: dict[int, tuple[Any, Problem]] = field(default_factory=dict)
    failure: str = ""  # of ours, where the library's kernel was taken instead


_current: ContextVar[Choosing | None] = ContextVar("ipex_choosing", default=None)


@contextlib.contextmanager
def choosing(now: Choosing) -> Iterator[Choosing]:
    """Inductor's lists are decided by `now`, in this thread."""
    _hook()
    token = _current.set(now)
    try:
        yield now
    finally:
        _current.reset(token)


def tell(offer: Offer) -> None:
    """Add to what was offered for the graph that is being learned, if one is."""
    now = _current.get()
    if now is not None:
        key = encode(offer.problem)
        before = now.offers.get(key)
        now.offers[key] = replace(offer, times=before.times + 1) if before else offer


def describe(caller: Any) -> Choice | None:
    """One of Inductor's choices as a record holds it; None for what we know no space of."""
    from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller
    from torch._inductor.select_algorithm import ExternKernelCaller, TritonTemplateCaller

    caller = getattr(caller, "_wrapped", caller)  # with its operands padded or packed
    if isinstance(caller, ExternKernelCaller):
        choice = Choice("library", f"aten.{caller.choice.name}")
    elif isinstance(caller, TritonTemplateCaller):
        name = re.sub(r"^triton_|_\d+$", "", caller.name)
        parameters = _parameters(caller.description)
        choice = Choice("template", f"inductor.triton.{name}", parameters, compat.TEMPLATES)
    elif isinstance(caller, CppTemplateCaller):
        micro: dict[str, bool | int | str] = {"micro": re.sub(r"^cpp_|_\d+$", "", caller.name)}
        name = type(caller.template).__name__.removeprefix("Cpp").removesuffix("Template").lower()
        choice = Choice("template", f"inductor.cpp.{name}", micro, compat.TEMPLATES)
    else:
        return None
    return choice if space.why_unknown(choice) is None else None


def _hook() -> None:
    """Have Inductor ask us and tell us; others may have cleared its lists since the last time."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    lists = get_algorithm_selector_cache()
    if _one not in lists.preprocessing_fns:
        lists.add_preprocessing_fn(_one)
    if _hear not in lists.feedback_saver_fns:
        lists.add_feedback_saver(_hear)


def _one(callers: list[Any]) -> list[Any]:
    """The one of `callers` that is selected, or else the library's; all of them outside."""
    now = _current.get()
    if now is None or not callers or (len(callers) < 2 and not now.selected):
        return callers
    default = next((c for c in callers if _is_library(c)), callers[0])
    try:
        return _chosen(now, callers, default)
    except Exception as error:  # in Inductor's hands it would be the user's
        now.failure = f"{type(error).__name__}: {error}"
        return callers if now.leaves or now.watches else [default]


def _chosen(now: Choosing, callers: list[Any], default: Any) -> list[Any]:
    problem = _problem(callers[0])
    if now.watches and problem is not None:
        now.watched |= {id(caller): (caller, problem) for caller in callers}
    if now.watches:
        return callers
    described: dict[bytes, tuple[Choice, Any]] = {}
    for caller in callers:
        choice = describe(caller)
        if choice is not None:
            described.setdefault(encode(choice), (choice, caller))
    usual = described.get(encode(describe(default)))
    if problem is None or usual is None:
        return callers if now.leaves else [default]
    key = encode(problem)
    choice, caller = described.get(encode(now.selected.get(key)), usual)
    if len(described) > 1 or key in now.selected:
        now.offers[key] = Offer(problem, tuple(c for c, _ in described.values()), choice)
    return [caller]


def _hear(timings: Mapping[Any, float], *_: Any) -> None:
    """What Inductor timed, in milliseconds, of the lists that we saw."""
    now = _current.get()
    caller = next((c for c in timings if now and id(c) in now.watched), None)
    if now is None or caller is None:
        return
    described = ((describe(c), ms) for c, ms in timings.items())
    told = {encode(choice): (choice, ms) for choice, ms in described if choice is not None}
    now.heard.append(Heard(now.watched[id(caller)][1], caller.layout.device, tuple(told.values())))


def _is_library(caller: Any) -> bool:
    from torch._inductor.select_algorithm import ExternKernelCaller

    return isinstance(caller, ExternKernelCaller)


def _problem(caller: Any) -> Problem | None:
    """The problem of the node that is being lowered, with the operands as they were lowered."""
    from torch._inductor.virtualized import V

    node = V.graph.current_node
    if node is None or node.target not in OPS:
        return None
    device = caller.layout.device
    strides = list(map(_stride, caller.input_nodes))
    return problem_of(node, arch_of(device), settings_of(device.type), strides)


@functools.cache
def arch_of(device: torch.device) -> str:
    """The architecture of its problems. Raises `DeviceError` if it is not there."""
    return str(target.current(device))


def _stride(buffer: Any) -> list[Any] | None:
    return getattr(buffer.get_layout(), "stride", None)


_PARAMETER = re.compile(r"(\w+)=([^,]+)")


def _parameters(description: str) -> dict[str, bool | int | str]:
    """Of all that Inductor writes of a template's options, what is chosen and does not follow."""
    found = dict(_PARAMETER.findall(description))
    return {name: _value(found[name].strip()) for name in TRITON_PARAMETERS if name in found}


def _value(text: str) -> bool | int | str:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if re.fullmatch(r"-?\d+", text) else text

"""Hook into Inductor's algorithm selection: an op gets a record's choice or the library's kernel.

Inductor calls `_one` with each list of candidates. Outside of `choosing` the list is returned
unchanged, so that plain Inductor compiles as before in this process.
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
from ipex_inductor.lowerings.problem.node_problem import problem_of
from ipex_inductor.lowerings.problem.settings import settings_of
from ipex_inductor.lowerings.problem.spaces import TRITON_PARAMETERS
from ipex_inductor.target import device as target

aten = torch.ops.aten

# Ops that may have more than one kernel.
OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
}


@dataclass
class Offer:
    """Hold the candidates that Inductor listed for one problem, in its order.

    Of several candidates with one name the first counts.

    Attributes:
        problem: problem of the op.
        choices: candidates.
        taken: candidate that the graph uses.
        times: number of nodes with this problem; only counted for `ipex::` ops.
    """

    problem: Problem
    choices: tuple[Choice, ...]
    taken: Choice
    times: int = 1


@dataclass(frozen=True)
class InductorTimes:
    """Hold the times that Inductor measured for one problem, in milliseconds.

    A candidate that failed has an infinite time.
    """

    problem: Problem
    device: torch.device
    times: tuple[tuple[Choice, float], ...]


@dataclass
class Choosing:
    """Hold the selections for one graph that is being lowered, and the candidates offered.

    Attributes:
        selected: choice for each encoded problem.
        leaves: whether Inductor decides about lists that no record can describe.
        watches: whether Inductor decides about all lists, with its times added to `heard`.
        offers: candidates by encoded problem.
        heard: times that Inductor measured.
        watched: Inductor's choice and problem by id of the choice; the choice is held so that
            its id stays unique.
        failure: error of our hook, after which the library's kernel was used.
    """

    selected: Mapping[bytes, Choice] = field(default_factory=dict)
    leaves: bool = False
    watches: bool = False
    offers: dict[bytes, Offer] = field(default_factory=dict)
    heard: list[InductorTimes] = field(default_factory=list)
    watched: dict[int, tuple[Any, Problem]] = field(default_factory=dict)
    failure: str = ""


_current: ContextVar[Choosing | None] = ContextVar("ipex_choosing", default=None)


@contextlib.contextmanager
def choosing(now: Choosing) -> Iterator[Choosing]:
    """Let `now` decide Inductor's lists of candidates within the context, in this thread."""
    _hook()
    token = _current.set(now)
    try:
        yield now
    finally:
        _current.reset(token)


def add_offer(offer: Offer) -> None:
    """Add an offer to the offers of the graph that is being lowered, if there is one."""
    current = _current.get()
    if current is not None:
        key = encode(offer.problem)
        before = current.offers.get(key)
        current.offers[key] = replace(offer, times=before.times + 1) if before else offer


def describe(caller: Any) -> Choice | None:
    """Return one of Inductor's choices in a record's form; None if its kind is not known."""
    from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller
    from torch._inductor.select_algorithm import ExternKernelCaller, TritonTemplateCaller

    caller = getattr(caller, "_wrapped", caller)  # wrapped if its operands are padded or packed
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
    """Register our functions with Inductor; other code may have cleared its lists since."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    lists = get_algorithm_selector_cache()
    if _one not in lists.preprocessing_fns:
        lists.add_preprocessing_fn(_one)
    if _add_times not in lists.feedback_saver_fns:
        lists.add_feedback_saver(_add_times)


def _one(callers: list[Any]) -> list[Any]:
    """Return the selected one of `callers`, or else the library's.

    Outside of `choosing` all of them are returned.
    """
    current = _current.get()
    if current is None or not callers or (len(callers) < 2 and not current.selected):
        return callers
    default = next((c for c in callers if _is_library(c)), callers[0])
    try:
        return _select(current, callers, default)
    except Exception as error:  # Raised through Inductor, it would fail the user's compilation.
        current.failure = f"{type(error).__name__}: {error}"
        return callers if current.leaves or current.watches else [default]


def _select(current: Choosing, callers: list[Any], default: Any) -> list[Any]:
    problem = _problem(callers[0])
    if current.watches and problem is not None:
        current.watched |= {id(caller): (caller, problem) for caller in callers}
    if current.watches:
        return callers
    described: dict[bytes, tuple[Choice, Any]] = {}
    for caller in callers:
        choice = describe(caller)
        if choice is not None:
            described.setdefault(encode(choice), (choice, caller))
    default_entry = described.get(encode(describe(default)))
    if problem is None or default_entry is None:
        return callers if current.leaves else [default]
    key = encode(problem)
    choice, caller = described.get(encode(current.selected.get(key)), default_entry)
    if len(described) > 1 or key in current.selected:
        current.offers[key] = Offer(problem, tuple(c for c, _ in described.values()), choice)
    return [caller]


def _add_times(timings: Mapping[Any, float], *_: Any) -> None:
    """Add the times that Inductor measured, in milliseconds, if the list was watched."""
    current = _current.get()
    caller = next((c for c in timings if current and id(c) in current.watched), None)
    if current is None or caller is None:
        return
    described = ((describe(c), ms) for c, ms in timings.items())
    times = {encode(choice): (choice, ms) for choice, ms in described if choice is not None}
    current.heard.append(
        InductorTimes(current.watched[id(caller)][1], caller.layout.device, tuple(times.values()))
    )


def _is_library(caller: Any) -> bool:
    from torch._inductor.select_algorithm import ExternKernelCaller

    return isinstance(caller, ExternKernelCaller)


def _problem(caller: Any) -> Problem | None:
    """Return the problem of the node that is being lowered, with its operands' strides."""
    from torch._inductor.virtualized import V

    node = V.graph.current_node
    if node is None or node.target not in OPS:
        return None
    device = caller.layout.device
    strides = list(map(_stride, caller.input_nodes))
    return problem_of(node, arch_of(device), settings_of(device.type), strides)


@functools.cache
def arch_of(device: torch.device) -> str:
    """Return the architecture that problems on `device` have.

    Raises:
        DeviceError: the device is not available.
    """
    return str(target.current(device))


def _stride(buffer: Any) -> list[Any] | None:
    return getattr(buffer.get_layout(), "stride", None)


_PARAMETER = re.compile(r"(\w+)=([^,]+)")


def _parameters(description: str) -> dict[str, bool | int | str]:
    """Return the chosen options in Inductor's description of a template, without derived ones."""
    options = dict(_PARAMETER.findall(description))
    return {name: _value(options[name].strip()) for name in TRITON_PARAMETERS if name in options}


def _value(text: str) -> bool | int | str:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if re.fullmatch(r"-?\d+", text) else text

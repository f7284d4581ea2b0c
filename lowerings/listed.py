"""Whose kernel an op gets, where Inductor has a list of them: a record's choice, or the library's.

Inductor calls `_one` with every such list. Outside of `choosing` it comes back as it was, so that
nothing changes for what plain Inductor compiles in the same process.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.autotune import space
from ipex_inductor.autotune.record import Choice, Constant, Problem, encode
from ipex_inductor.lowerings.workload import problem_of

aten = torch.ops.aten

# Of what each op has more than one kernel: name of the list, then of a template's parameters.
OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
}

_TILES = tuple(2**n for n in range(3, 10))
_TRITON: dict[str, tuple[bool | int | str, ...]] = {
    "num_stages": tuple(range(9)),
    "num_warps": (1, 2, 4, 8, 16),
}
_TRITON_OPTIONAL: dict[str, tuple[bool | int | str, ...]] = {
    "BLOCK_M": _TILES,
    "BLOCK_N": _TILES,
    "BLOCK_K": _TILES,
    "GROUP_M": tuple(range(1, 17)),
    "NUM_SMS": tuple(range(1, 1025)),
    "EPILOGUE_SUBTILE": (False, True, 0, 1, 2, 4),
    "matrix_instr_nonkdim": (0, 16, 32),
    "waves_per_eu": tuple(range(9)),
    "kpack": (1, 2),
}
_LIBRARY = (
    "mm",
    "mm_dtype",
    "addmm",
    "bias_addmm",
    "bmm",
    "bmm_dtype",
    "baddbmm",
    "convolution",
    "conv1x1_via_mm",
)
_TRITON_NAMES = (
    "mm",
    "bmm",
    "mm_persistent_tma",
    "blackwell_ws_persistent_device_tma",
    "convolution2d",
    "convolution3d",
    "depthwise_conv1d",
    "decompose_k",
)
_MICRO = tuple(f"CppMicro{name}" for name in ("GemmAMX", "GemmFP32Vec", "GemmRef", "Brgemm"))

for _name in _LIBRARY:
    space.register("library", f"aten.{_name}")
for _name in _TRITON_NAMES:
    space.register("template", f"inductor.triton.{_name}", optional=_TRITON_OPTIONAL, **_TRITON)
space.register("template", "inductor.cpp.bmm", micro=_MICRO)


@dataclass
class Offer:
    """What Inductor listed for one problem, in its order; the first of a name counts."""

    problem: Problem
    choices: tuple[Choice, ...]
    default: Choice
    taken: Choice


@dataclass
class Choosing:
    """What is to be chosen while one graph is lowered, and what was."""

    arch: str
    settings: Mapping[str, Constant] = field(default_factory=dict)
    selected: Mapping[bytes, Choice] = field(default_factory=dict)
    offers: dict[bytes, Offer] = field(default_factory=dict)


_current: ContextVar[Choosing | None] = ContextVar("ipex_choosing", default=None)


@contextlib.contextmanager
def choosing(now: Choosing) -> Iterator[Choosing]:
    """Inductor's lists are decided by `now`, in this thread; it times nothing itself."""
    _hook()
    token = _current.set(now)
    try:
        yield now
    finally:
        _current.reset(token)


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
        choice = Choice("template", f"inductor.triton.{name}", parameters, _version())
    elif isinstance(caller, CppTemplateCaller):
        micro = {"micro": re.sub(r"^cpp_|_\d+$", "", caller.name)}
        name = type(caller.template).__name__.removeprefix("Cpp").removesuffix("Template").lower()
        choice = Choice("template", f"inductor.cpp.{name}", micro, _version())
    else:
        return None
    return choice if space.why_unknown(choice) is None else None


@functools.cache
def _hook() -> None:
    """Have Inductor ask us, once a process; it has no other way to say which kernel is meant."""
    from torch._inductor.select_algorithm import add_preprocessing_fn

    add_preprocessing_fn(_one)


def _one(callers: list[Any]) -> list[Any]:
    """The one of `callers` that is selected, or else the library's; all of them outside."""
    now = _current.get()
    if now is None or not callers:
        return callers
    by_choice: dict[bytes, tuple[Choice, Any]] = {}
    for caller in callers:
        choice = describe(caller)
        if choice is not None:
            by_choice.setdefault(encode(choice), (choice, caller))
    default = next((c for c in callers if _is_library(c)), callers[0])
    if len(by_choice) < 2 or (problem := _problem(now, callers[0])) is None:
        return [default]
    key = encode(problem)
    wanted = now.selected.get(key)
    taken = by_choice.get(encode(wanted)) if wanted is not None else None
    usual = describe(default) or next(iter(by_choice.values()))[0]
    now.offers.setdefault(
        key,
        Offer(
            problem, tuple(c for c, _ in by_choice.values()), usual, taken[0] if taken else usual
        ),
    )
    return [taken[1] if taken else default]


def _is_library(caller: Any) -> bool:
    from torch._inductor.select_algorithm import ExternKernelCaller

    return isinstance(caller, ExternKernelCaller)


def _problem(now: Choosing, caller: Any) -> Problem | None:
    """The problem of the node that is being lowered, with the operands as they were lowered."""
    from torch._inductor.virtualized import V

    node = V.graph.current_node
    if node is None or node.target not in OPS:
        return None
    return problem_of(node, now.arch, now.settings, list(map(_stride, caller.input_nodes)))


def _stride(buffer: Any) -> tuple[int, ...] | None:
    layout = buffer.get_layout()
    stride = getattr(layout, "stride", None)
    if stride is None or not all(getattr(n, "is_Integer", type(n) is int) for n in stride):
        return None
    return tuple(map(int, stride))


_PARAMETER = re.compile(r"(\w+)=([^,]+)")


def _parameters(description: str) -> dict[str, bool | int | str]:
    """Of all that Inductor writes of a template's options, what is chosen and does not follow."""
    found = dict(_PARAMETER.findall(description))
    chosen = {**_TRITON, **_TRITON_OPTIONAL}
    return {name: _value(text.strip()) for name, text in found.items() if name in chosen}


def _value(text: str) -> bool | int | str:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _version() -> str:
    """Whose template it is: with another torch it is another one."""
    return f"torch {compat.VERSION.split('+')[0]}"



"""Overrides of Inductor's view of the CPU, and of the names of C++ for other machines.

All of it applies to the current thread. The last caller to leave restores Inductor's functions.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class _Target:
    """Target CPU: vectors by Inductor's names, oneDNN's answers, compiler, name for its flags."""

    vectors: tuple[str, ...]
    onednn: Mapping[str, bool]
    flags: str = ""
    compiler: str = ""
    isas: list[Any] = field(default_factory=list)


_target: ContextVar[_Target | None] = ContextVar("told", default=None)
_inside = 0
_usual: list[tuple[Any, str, Any]] = []
_lock = threading.Lock()


def compiles_for_levels() -> bool:
    """Return whether Inductor accepts a value of `-march`; otherwise its C++ fits this CPU only."""
    from torch._inductor import config

    return hasattr(config.cpp, "march")


@contextlib.contextmanager
def vectors(names: tuple[str, ...], onednn: Mapping[str, bool]) -> Iterator[None]:
    """Give the CPU these vectors, and oneDNN on it these GEMMs; no compiler is run to find out.

    Args:
        names: the vector classes by Inductor's names.
        onednn: the answer of each oneDNN op by its name.
    """
    with (
        _stand_ins_installed(),
        _set_target(_Target(names, onednn, isas=[_isa(name) for name in names])),
    ):
        yield


@contextlib.contextmanager
def use_portable_names(flags: str, compiler: str) -> Iterator[None]:
    """Give C++ equal names whatever the locations of torch and Python, and whatever the compiler.

    Use it inside `vectors`.

    Args:
        flags: text that distinguishes this C++ from other C++ with an equal source.
        compiler: the compiler, which is not run unless there is something to compile.
    """
    target = _target.get()
    assert target is not None
    with _set_target(_Target(target.vectors, target.onednn, flags, compiler, target.isas)):
        yield


@contextlib.contextmanager
def _set_target(target: _Target) -> Iterator[None]:
    """Set the target of this thread meanwhile."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


@functools.cache
def _isa(name: str) -> Any:
    """Return one of Inductor's vector ISAs that neither tries the compiler nor queries the CPU."""
    from torch._inductor import cpu_vec_isa

    kind = getattr(cpu_vec_isa, name)
    overrides = {
        "__bool__": lambda _: True,
        "__hash__": kind.__hash__,
        "build_arch_flags": lambda _: kind._arch_flags,
        "is_avx512_bf16_supported": lambda _: False,  # of templates that are timed
    }
    return type(name, (kind,), overrides)()


@contextlib.contextmanager
def _stand_ins_installed() -> Iterator[None]:
    """Replace Inductor's functions meanwhile; the last one to leave restores them."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            _install()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                while _usual:
                    setattr(*_usual.pop())


def _install() -> None:
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa

    onednn: Any = torch.ops.mkldnn
    _stand_in(cpu_vec_isa, "valid_vec_isa_list", lambda target, usual: target.isas)
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        _usual.append((onednn, name, getattr(onednn, name)))
        setattr(onednn, name, _Answer(name, getattr(onednn, name)))
    _stand_in(cpp_builder, "get_cpp_compiler", lambda target, usual: target.compiler or usual())
    _stand_in(cpp_builder, "_is_intel_compiler", _is_intel)
    _stand_in(cpp_builder.CppBuilder, "get_command_line", _line)
    _stand_in(codecache.CacheBase, "get_system", _system)


class _Answer:
    """Stand-in for an op that differs from it in its answer only."""

    def __init__(self, name: str, usual: Any) -> None:
        self._name, self._usual = name, usual

    def __call__(self) -> bool:
        target = _target.get()
        return bool(self._usual() if target is None else target.onednn[self._name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)


def _stand_in(owner: Any, name: str, answer: Callable[..., Any]) -> None:
    """Replace a function by one that calls `answer` while a target is set."""
    usual = getattr(owner, name)
    descriptor = vars(owner)[name]

    def call_or_answer(*arguments: Any, **named: Any) -> Any:
        target = _target.get()
        if target is None:
            return usual(*arguments, **named)
        return answer(target, functools.partial(usual, *arguments, **named), *arguments)

    _usual.append((owner, name, descriptor))
    setattr(
        owner,
        name,
        staticmethod(call_or_answer) if isinstance(descriptor, staticmethod) else call_or_answer,
    )


def _is_intel(target: _Target, usual: Callable[[], bool], compiler: str) -> bool:
    """Return whether `compiler` is Intel's, by its name: it is not run to find out."""
    return bool(re.search(r"\bicp?x\b", compiler)) if target.compiler else usual()


def _system(target: _Target, usual: Callable[[], Any], *_: Any) -> Any:
    """Return a system without a GPU: the GPU's name would be in the keys of all graphs."""
    return {"hash": "none"} if target.flags else usual()


def _line(target: _Target, usual: Callable[[], str], builder: Any) -> str:
    """Return the flags that a source's name depends on beside its text: none of this machine's."""
    if not target.flags or (builder._name, builder._sources_args) != ("o", "i"):
        return usual()
    flags = builder._definitions_args, builder._passthrough_parameters_args
    return " ".join((target.flags, *flags, f"linked: {builder._do_link}"))

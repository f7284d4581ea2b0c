"""What Inductor is told of the CPU, and how it names C++ that may have been compiled elsewhere.

All of it is of this thread. What stands in Inductor's place is put back by who leaves last.
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
class _Told:
    """Vectors by Inductor's names, what oneDNN answers; a compiler, and a name for its flags."""

    vectors: tuple[str, ...]
    onednn: Mapping[str, bool]
    flags: str = ""
    compiler: str = ""
    isas: list[Any] = field(default_factory=list)


_told: ContextVar[_Told | None] = ContextVar("told", default=None)
_inside = 0
_usual: list[tuple[Any, str, Any]] = []
_lock = threading.Lock()


def compiles_for_levels() -> bool:
    """Whether Inductor takes a value of `-march`; else its C++ is for the CPU here alone."""
    from torch._inductor import config

    return hasattr(config.cpp, "march")


@contextlib.contextmanager
def vectors(names: tuple[str, ...], onednn: Mapping[str, bool]) -> Iterator[None]:
    """The CPU has these vectors, and oneDNN on it these products; no compiler is asked for them."""
    with _installed(), _telling(_Told(names, onednn, isas=[_isa(name) for name in names])):
        yield


@contextlib.contextmanager
def named_alike(flags: str, compiler: str) -> Iterator[None]:
    """C++ lies under the same names wherever torch and Python lie, whatever compiler is there.

    Inside of `vectors`. `flags`: what tells it apart from other C++ of the same text. `compiler` is
    not run, unless there is something to compile.
    """
    told = _told.get()
    assert told is not None
    with _telling(_Told(told.vectors, told.onednn, flags, compiler, told.isas)):
        yield


@contextlib.contextmanager
def _telling(told: _Told) -> Iterator[None]:
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


@functools.cache
def _isa(name: str) -> Any:
    """One of Inductor's, which neither tries the compiler nor asks the CPU."""
    from torch._inductor import cpu_vec_isa

    kind = getattr(cpu_vec_isa, name)
    known = {
        "__bool__": lambda _: True,
        "__hash__": kind.__hash__,
        "build_arch_flags": lambda _: kind._arch_flags,
        "is_avx512_bf16_supported": lambda _: False,  # of templates that are timed
    }
    return type(name, (kind,), known)()


@contextlib.contextmanager
def _installed() -> Iterator[None]:
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
    _stand_in(cpu_vec_isa, "valid_vec_isa_list", lambda told, usual: told.isas)
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        _usual.append((onednn, name, getattr(onednn, name)))
        setattr(onednn, name, _Answer(name, getattr(onednn, name)))
    _stand_in(cpp_builder, "get_cpp_compiler", lambda told, usual: told.compiler or usual())
    _stand_in(cpp_builder, "_is_intel_compiler", _is_intel)
    _stand_in(cpp_builder.CppBuilder, "get_command_line", _line)
    _stand_in(codecache.CacheBase, "get_system", _system)


class _Answer:
    """In the place of an op, which it is in all else."""

    def __init__(self, name: str, usual: Any) -> None:
        self._name, self._usual = name, usual

    def __call__(self) -> bool:
        told = _told.get()
        return bool(self._usual() if told is None else told.onednn[self._name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)


def _stand_in(owner: Any, name: str, answer: Callable[..., Any]) -> None:
    usual = getattr(owner, name)
    held = vars(owner)[name]

    def asked(*arguments: Any, **named: Any) -> Any:
        told = _told.get()
        if told is None:
            return usual(*arguments, **named)
        return answer(told, functools.partial(usual, *arguments, **named), *arguments)

    _usual.append((owner, name, held))
    setattr(owner, name, staticmethod(asked) if isinstance(held, staticmethod) else asked)


def _is_intel(told: _Told, usual: Callable[[], bool], compiler: str) -> bool:
    """By its name: it is not run for that."""
    return bool(re.search(r"\bicp?x\b", compiler)) if told.compiler else usual()


def _system(told: _Told, usual: Callable[[], Any], *_: Any) -> Any:
    """No GPU that may be there as well: its name is in the keys of all graphs."""
    return {"hash": "none"} if told.flags else usual()


def _line(told: _Told, usual: Callable[[], str], builder: Any) -> str:
    """What a source's name is made of beside its text: nothing of this machine."""
    if not told.flags or (builder._name, builder._sources_args) != ("o", "i"):
        return usual()
    given = builder._definitions_args, builder._passthrough_parameters_args
    return " ".join((told.flags, *given, f"linked: {builder._do_link}"))

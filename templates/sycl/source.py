"""A kernel in SYCL as text, with what compiling and launching it must know."""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.aot_cache.key import Pairs
from ipex_inductor.errors import ArgumentError

POINTER = "*"
SCALARS = ("i32", "i64", "fp32", "fp64")
ASPECTS = ("fp16", "fp64", "matrix", "dots")  # of a device, that a kernel may need

# What Intel's compiler takes and must not be given, with what happens.
BANNED = {
    "sycl/sycl.hpp": "takes a second to parse; include what is used",
    "sycl/builtins.hpp": "takes 0.6 s to parse; lean.cpp has the compiler's own words",
    "sycl/group_algorithm.hpp": "takes 0.6 s to parse; lean.cpp has the compiler's own words",
    "matrix/matrix.hpp": "takes 0.8 s to parse; engine.cpp has the compiler's own words",
    "group_local_memory": "ends the process, and so does its form without initialisation; "
    "declare a static sycl::ext::oneapi::experimental::work_group_static",
}


@dataclass(frozen=True)
class Entry:
    """One kernel of a source, a free function that is `extern "C"`.

    `arguments`: the kind of each in order, a pointer ("*") or one of `SCALARS`. `dims`: of its
    range. `sub_group`: the size it asks for, 0 for the device's own.
    """

    name: str
    arguments: tuple[str, ...]
    dims: int = 1
    sub_group: int = 0

    def __post_init__(self) -> None:
        if odd := {*self.arguments} - {POINTER, *SCALARS}:
            todo = f"Kinds are {POINTER!r} and {', '.join(SCALARS)}."
            raise ArgumentError("kinds of arguments", f"{sorted(odd)} of {self.name}", todo)


@dataclass(frozen=True)
class Source:
    """A rendered source with its kernels.

    `options` are those of the compiler to SPIR-V (`-D...`, `-ffp-contract=off`), `native` those of
    the device's (`-ze-opt-large-register-file`). `needs`: of `ASPECTS`, what a device must have.
    `problem` names it in keys, for people. Raises `ArgumentError` for text that is known to crash.
    """

    text: str
    entries: tuple[Entry, ...]
    options: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    problem: Pairs = ()

    def __post_init__(self) -> None:
        for word, why in BANNED.items():
            if word in self.text:
                raise ArgumentError(f"a source without {word}", "one with it", f"It {why}.")
        if odd := {*self.needs} - {*ASPECTS}:
            todo = f"Aspects are {', '.join(ASPECTS)}."
            raise ArgumentError("aspects of a device", f"{sorted(odd)}", todo)

    @property
    def named(self) -> str:
        """Its kernels, in words."""
        return ", ".join(entry.name for entry in self.entries)

    def entry(self, name: str) -> Entry:
        """The kernel of that name."""
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def manifest(self) -> dict[str, Any]:
        """What the cache's entries say of it, as plain JSON."""
        return {
            "entries": [
                {
                    "name": entry.name,
                    "arguments": list(entry.arguments),
                    "dims": entry.dims,
                    "sub_group": entry.sub_group,
                }
                for entry in self.entries
            ],
            "needs": list(self.needs),
            "native": list(self.native),
        }

"""A SYCL kernel as text, with the facts that compiling and launching need."""

from dataclasses import dataclass
from typing import Any

from ipex_inductor.aot_cache.key import Pairs
from ipex_inductor.errors import ArgumentError

POINTER = "*"
SCALARS = ("i32", "i64", "fp32", "fp64")
ASPECTS = ("fp16", "fp64", "matrix", "dots")  # features of a device that a kernel may need

# Text that Intel's compiler accepts but that must not occur in a source, with the reason.
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
    """A kernel of a source, a free function that is `extern "C"`.

    `arguments`: the kind of each in order, a pointer ("*") or one of `SCALARS`. `dims`: the
    dimensions of its range. `sub_group`: the size it requires, 0 for the device's own.
    """

    name: str
    arguments: tuple[str, ...]
    dims: int = 1
    sub_group: int = 0

    def __post_init__(self) -> None:
        if odd := {*self.arguments} - {POINTER, *SCALARS}:
            remedy = f"Kinds are {POINTER!r} and {', '.join(SCALARS)}."
            raise ArgumentError("kinds of arguments", f"{sorted(odd)} of {self.name}", remedy)


@dataclass(frozen=True)
class Source:
    """A rendered source with its kernels.

    `options` are for the compiler to SPIR-V (`-D...`, `-ffp-contract=off`), `native` for the
    device's compiler (`-ze-opt-large-register-file`). `needs`: the `ASPECTS` that a device must
    have. `problem` names it in cache keys, for people. Raises `ArgumentError` for text that is
    known to crash.
    """

    text: str
    entries: tuple[Entry, ...]
    options: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    problem: Pairs = ()

    def __post_init__(self) -> None:
        for banned, why in BANNED.items():
            if banned in self.text:
                raise ArgumentError(f"a source without {banned}", "one with it", f"It {why}.")
        if odd := {*self.needs} - {*ASPECTS}:
            remedy = f"Aspects are {', '.join(ASPECTS)}."
            raise ArgumentError("aspects of a device", f"{sorted(odd)}", remedy)

    @property
    def kernel_names(self) -> str:
        """Return the names of the kernels, joined by commas."""
        return ", ".join(entry.name for entry in self.entries)

    def entry(self, name: str) -> Entry:
        """Return the kernel of that name."""
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the metadata for cache entries, as plain JSON."""
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

"""What Triton's kernels take of a multiprocessor, as the driver said when it loaded them."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

_NAMES = {"registers": "n_regs", "spills": "n_spills", "shared_memory": "shared"}


@contextlib.contextmanager
def loaded() -> Iterator[list[Any]]:
    """The modules of code that Inductor loads meanwhile: they are in the list when it is over."""
    from torch._inductor.codecache import PyCodeCache

    before = len(PyCodeCache.modules)
    modules: list[Any] = []
    try:
        yield modules
    finally:
        modules += PyCodeCache.modules[before:]


def taken(modules: Iterable[Any]) -> dict[str, int]:
    """The most that any template in them takes; empty if there is none.

    Registers and spills are a thread's (in 4 bytes each), shared memory a block's in bytes.
    """
    takes: dict[str, int] = {}
    for module in modules:
        for name, kernel in vars(module).items():
            if name.startswith("triton_tem"):
                _widen(takes, kernel)
    return takes


def _widen(takes: dict[str, int], kernel: Any) -> None:
    for launcher in getattr(kernel, "launchers", ()):
        for ours, theirs in _NAMES.items():
            value = getattr(launcher, theirs, None)
            if isinstance(value, int):
                takes[ours] = max(value, takes.get(ours, 0))

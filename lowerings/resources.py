"""What Triton's kernels take of a multiprocessor, as the driver said when it loaded them."""

import contextlib
from collections.abc import Iterator
from typing import Any

_NAMES = {"registers": "n_regs", "spills": "n_spills", "shared_memory": "shared"}


@contextlib.contextmanager
def of_loaded() -> Iterator[dict[str, int]]:
    """The most that any template takes which Inductor loads meanwhile; empty if there is none.

    Registers and spills are a thread's (in 4 bytes each), shared memory a block's in bytes.
    """
    from torch._inductor.codecache import PyCodeCache

    before = len(PyCodeCache.modules)
    takes: dict[str, int] = {}
    yield takes
    for module in PyCodeCache.modules[before:]:
        for name, kernel in vars(module).items():
            if name.startswith("triton_tem"):
                _widen(takes, kernel)


def _widen(takes: dict[str, int], kernel: Any) -> None:
    for launcher in getattr(kernel, "launchers", ()):
        for ours, theirs in _NAMES.items():
            value = getattr(launcher, theirs, None)
            if isinstance(value, int):
                takes[ours] = max(value, takes.get(ours, 0))

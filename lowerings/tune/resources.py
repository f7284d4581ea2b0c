"""Multiprocessor resources that Triton kernels use, as reported by the driver on loading."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

_NAMES = {"registers": "n_regs", "spills": "n_spills", "shared_memory": "shared"}


@contextlib.contextmanager
def collect_modules() -> Iterator[list[Any]]:
    """Collect the modules that Inductor loads within the context.

    The list that the context yields is filled when the context ends.
    """
    from torch._inductor.codecache import PyCodeCache

    before = len(PyCodeCache.modules)
    modules: list[Any] = []
    try:
        yield modules
    finally:
        modules += PyCodeCache.modules[before:]


def resource_use(modules: Iterable[Any]) -> dict[str, int]:
    """Return the largest resource use of any template in `modules`; empty if there is none.

    Registers and spills are per thread in units of 4 bytes. Shared memory is per block in bytes.
    """
    takes: dict[str, int] = {}
    for module in modules:
        for name, kernel in vars(module).items():
            if name.startswith("triton_tem"):
                _raise_maxima(takes, kernel)
    return takes


def _raise_maxima(takes: dict[str, int], kernel: Any) -> None:
    for launcher in getattr(kernel, "launchers", ()):
        for name, attribute in _NAMES.items():
            value = getattr(launcher, attribute, None)
            if isinstance(value, int):
                takes[name] = max(value, takes.get(name, 0))

"""Early tries of the C++ compiler, which Inductor makes before it generates a first loop."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_tried = False  # by this process


@contextlib.contextmanager
def vectors_tried(use_best: Callable[[Any], object] | None = None) -> Iterator[None]:
    """Try whether compiler and CPU support AVX2, AVX-512 ... in the background of the tracing.

    Inductor tries it when it generates the first loop, and each try takes g++ two seconds, once per
    machine. Results are stored where Inductor looks for them; tries not begun by the end are
    dropped.

    Args:
        use_best: called, as soon as the result is known, with the vectors that Inductor uses by
            default, to begin something with them.
    """
    from torch._inductor import cpu_vec_isa

    global _tried
    if _tried or cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:  # this process knows
        if use_best is not None:
            use_best(cpu_vec_isa.pick_vec_isa())
        yield
        return
    _tried = True
    has = {*cpu_vec_isa.x86_isa_checker()}
    tries = ThreadPoolExecutor(1, "ipex vectors")
    best = [] if use_best is None else [use_best]  # emptied by the call
    for isa in map(_copy_isa, cpu_vec_isa.supported_vec_isa_list):
        if {*str(isa).split()} <= has:
            tries.submit(_try, isa, best)
    try:
        yield
    finally:
        tries.shutdown(cancel_futures=True)


def _try(isa: Any, best: list[Callable[[Any], object]]) -> None:
    """Try one set of vectors; the first that works is the best, by the order of Inductor's list."""
    if isa and best:
        best.pop()(isa)


def _copy_isa(isa: Any) -> Any:
    """Return a copy of `isa` that torch does not take for its own, as a try changes it."""
    kind = type(isa)
    same = {"__eq__": object.__eq__, "__hash__": object.__hash__}  # for torch's memory of tries
    return type(kind.__name__, (kind,), same)()

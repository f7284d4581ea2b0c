"""What Inductor tries of the C++ compiler before it generates a first loop."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_tried = False  # by this process


@contextlib.contextmanager
def vectors_tried(use_best: Callable[[Any], object] | None = None) -> Iterator[None]:
    """Whether compiler and CPU can do AVX2, AVX-512 ... is tried while the graph is traced.

    `use_best`: called, as soon as that is known, with the vectors that Inductor takes unless it is
    told otherwise, for it to begin something.

    Inductor asks when it generates the first loop, and each answer takes g++ two seconds, once a
    machine. Answers lie where Inductor looks for them; what nobody has begun by the end is left.
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
    best = [] if use_best is None else [use_best]  # until it was called
    for isa in map(_apart, cpu_vec_isa.supported_vec_isa_list):
        if {*str(isa).split()} <= has:
            tries.submit(_try, isa, best)
    try:
        yield
    finally:
        tries.shutdown(cancel_futures=True)


def _try(isa: Any, best: list[Callable[[Any], object]]) -> None:
    """Try one; the first that works is the best, as Inductor lists them in that order."""
    if isa and best:
        best.pop()(isa)


def _apart(isa: Any) -> Any:
    """One that is asked the same, and that torch does not take for its own: a try changes it."""
    kind = type(isa)
    same = {"__eq__": object.__eq__, "__hash__": object.__hash__}  # of what torch remembers
    return type(kind.__name__, (kind,), same)()

"""What Inductor tries of the C++ compiler before it generates a first loop."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_tried = False  # by this process


@contextlib.contextmanager
def vectors_tried() -> Iterator[None]:
    """Whether compiler and CPU can do AVX2, AVX-512 ... is tried while the graph is traced.

    Inductor asks when it generates the first loop, and each answer takes g++ two seconds, once a
    machine. Answers lie where Inductor looks for them; what nobody has begun by the end is left.
    """
    from torch._inductor import cpu_vec_isa

    global _tried
    if _tried or cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:  # this process knows
        yield
        return
    _tried = True
    has = {*cpu_vec_isa.x86_isa_checker()}
    tries = ThreadPoolExecutor(1, "ipex vectors")
    for isa in map(_apart, cpu_vec_isa.supported_vec_isa_list):
        if {*str(isa).split()} <= has:
            tries.submit(bool, isa)
    try:
        yield
    finally:
        tries.shutdown(cancel_futures=True)


def _apart(isa: Any) -> Any:
    """One that is asked the same, and that torch does not take for its own: a try changes it."""
    kind = type(isa)
    same = {"__eq__": object.__eq__, "__hash__": object.__hash__}  # of what torch remembers
    return type(kind.__name__, (kind,), same)()

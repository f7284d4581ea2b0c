"""Number and cores of the OpenMP threads that the calling thread uses.

torch's own setting of their number is process-wide. Cores need Linux.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run what torch does inside the block in one thread, if OpenMP is available.

    For short work: two threads that synchronize wait milliseconds on busy cores.
    """
    count, set_number = torch.get_num_threads(), _set_number()
    if count == 1 or set_number is None:
        yield
        return
    set_number(1)
    try:
        yield
    finally:
        set_number(count)


def can_bind() -> bool:
    """Return True if threads of a team can be bound to cores: on Linux, with OpenMP in torch."""
    return hasattr(os, "sched_setaffinity") and None not in (_set_number(), _parallel())


def bind(cores: Sequence[int], free: Iterable[int]) -> None:
    """Bind the OpenMP team of this thread to `cores`, one thread per core, itself to the first.

    Other threads keep their number and cores; threads that they start inherit theirs. Needs
    `can_bind()`.

    Args:
        cores: one core per thread.
        free: cores of this thread inside `unbind`.
    """
    _set_threads(len(cores), len(cores))
    in_each(len(cores), lambda number: os.sched_setaffinity(0, {cores[number]}))
    _bound.free = set(free)


@contextlib.contextmanager
def bind_team(cores: Sequence[int]) -> Iterator[None]:
    """Bind the team to `cores` inside the block, and restore its threads and cores after it."""
    count, free = torch.get_num_threads(), getattr(_bound, "free", None)
    before = _cores_of_team(count)
    _bound.free = free or before[0]
    mkl = _set_threads(len(cores), len(cores))
    try:
        in_each(len(cores), lambda number: os.sched_setaffinity(0, {cores[number]}))
        yield
    finally:
        _bound.free = free
        os.sched_setaffinity(0, before[0])  # new OpenMP threads inherit these cores
        _set_threads(count, mkl)
        in_each(count, lambda number: os.sched_setaffinity(0, before.get(number, before[0])))


@contextlib.contextmanager
def unbind() -> Iterator[None]:
    """Give this thread its cores of before `bind` inside the block, for threads started there.

    A pool of compile workers outlives the call that starts it, and would stay on one core.
    """
    free = getattr(_bound, "free", None)
    if free is None:
        yield
        return
    current_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, free)
    try:
        yield
    finally:
        os.sched_setaffinity(0, current_cores)


def in_each(count: int, call: Callable[[int], object]) -> None:
    """Run `call(number)` in each of `count` threads of this thread's team; the first is this one.

    Raises what a call raised. Needs `can_bind()`.
    """
    # Finds any function of the process, and holds the GIL.
    parallel, number = _parallel(), ctypes.pythonapi
    assert parallel is not None
    errors: list[BaseException] = []

    def run(_: object) -> None:
        try:
            call(number.omp_get_thread_num())
        except BaseException as error:  # or ctypes would print it
            errors.append(error)

    parallel(_REGION(run), None, count, 0)
    if errors:
        raise errors[0]


def openmp_places() -> frozenset[int]:
    """Return the cores that OpenMP was set to use (OMP_PLACES, OMP_PROC_BIND); empty if unset.

    If set, OpenMP bound the first thread when it was loaded, so that its cores from Linux are
    useless.
    """
    if not can_bind():
        return frozenset()
    openmp, cores = ctypes.CDLL(None), set()
    for place in range(openmp.omp_get_num_places()):
        numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, numbers)
        cores.update(numbers)
    return frozenset(cores)


_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_bound = threading.local()  # `free`: the cores this thread had before it was bound


def _cores_of_team(count: int) -> dict[int, set[int]]:
    """Return the cores of each thread of this thread's team."""
    cores: dict[int, set[int]] = {}

    def look(number: int) -> None:
        cores[number] = os.sched_getaffinity(0)

    in_each(count, look)
    return cores


def _set_threads(count: int, mkl: int) -> int:
    """Set this thread's OpenMP and MKL thread numbers; return MKL's former one (0: OpenMP's)."""
    torch.get_num_threads()  # a thread takes the process's number at its first call
    set_number = _set_number()
    assert set_number is not None
    set_number(count)
    local = _mkl_local()
    return local(mkl) if local else 0


@functools.cache
def _set_number() -> Callable[[int], object] | None:
    """Return OpenMP's function for the number of threads, None if torch does not follow it."""
    try:
        # The symbol is global, as torch's libraries share one runtime.
        set_number = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    count = torch.get_num_threads()
    set_number(count + 1)
    shows = torch.get_num_threads() == count + 1
    set_number(count)
    return set_number if shows else None


@functools.cache
def _parallel() -> Callable[..., object] | None:
    """Return the entry of parallel regions of GNU's OpenMP, which LLVM's has too, or None."""
    try:
        return ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None


@functools.cache
def _mkl_local() -> Callable[[int], int] | None:
    """Return MKL's function for this thread's number, or None.

    `torch.set_num_threads` calls it too.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).MKL_Set_Num_Threads_Local
    except (AttributeError, OSError):
        return None

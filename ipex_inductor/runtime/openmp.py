"""OpenMP's threads for what this thread calls: how many, and on which cores.

torch's own setting of their number is the process's. Linux has the cores.
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
    """What torch does inside it does in one thread; where OpenMP is not to be had, in all.

    For short work: two threads that must meet wait milliseconds where the cores are busy.
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
    """Whether the threads of one team can be told their cores: Linux, with OpenMP under torch."""
    return hasattr(os, "sched_setaffinity") and None not in (_set_number(), _parallel())


def bind(cores: Sequence[int], free: Iterable[int]) -> None:
    """From now on this thread has `cores` for what it calls, a thread a core, itself on the first.

    Other threads keep their number and cores; those it starts inherit its own. `free`: its cores
    where it is `unbound`. Needs `can_bind()`.
    """
    _set_threads(len(cores), len(cores))
    in_each(len(cores), lambda number: os.sched_setaffinity(0, {cores[number]}))
    _bound.free = set(free)


@contextlib.contextmanager
def bound(cores: Sequence[int]) -> Iterator[None]:
    """`bind` inside, and all as it was behind it: the number, and each thread's cores."""
    count, free = torch.get_num_threads(), getattr(_bound, "free", None)
    before = _looked_at(count)
    _bound.free = free or before[0]
    mkl = _set_threads(len(cores), len(cores))
    try:
        in_each(len(cores), lambda number: os.sched_setaffinity(0, {cores[number]}))
        yield
    finally:
        _bound.free = free
        os.sched_setaffinity(0, before[0])  # which threads that OpenMP starts now inherit
        _set_threads(count, mkl)
        in_each(count, lambda number: os.sched_setaffinity(0, before.get(number, before[0])))


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """Inside, this thread itself has its cores of before `bind`, for the threads it starts there.

    A pool of compile workers outlives the call that starts it, and would stay on one core.
    """
    free = getattr(_bound, "free", None)
    if free is None:
        yield
        return
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, free)
    try:
        yield
    finally:
        os.sched_setaffinity(0, here)


def in_each(count: int, call: Callable[[int], object]) -> None:
    """Run `call(number)` in each of `count` threads of this thread's team; the first is this one.

    Raises what a call raised. Needs `can_bind()`.
    """
    parallel, number = _parallel(), ctypes.pythonapi  # any function of the process, GIL held
    assert parallel is not None
    failed: list[BaseException] = []

    def run(_: object) -> None:
        try:
            call(number.omp_get_thread_num())
        except BaseException as error:  # or ctypes would print it
            failed.append(error)

    parallel(_REGION(run), None, count, 0)
    if failed:
        raise failed[0]


def places() -> frozenset[int]:
    """The cores that OpenMP was told to share out (OMP_PLACES, OMP_PROC_BIND); none if it was not.

    Then it put the first thread on one of them when it was loaded: what Linux says is of no use.
    """
    if not can_bind():
        return frozenset()
    openmp, found = ctypes.CDLL(None), set()
    for place in range(openmp.omp_get_num_places()):
        numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, numbers)
        found.update(numbers)
    return frozenset(found)


_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_bound = threading.local()  # `free`: the cores this thread had before it was bound


def _looked_at(count: int) -> dict[int, set[int]]:
    """The cores of each thread of this thread's team."""
    seen: dict[int, set[int]] = {}

    def look(number: int) -> None:
        seen[number] = os.sched_getaffinity(0)

    in_each(count, look)
    return seen


def _set_threads(count: int, mkl: int) -> int:
    """This thread's numbers, OpenMP's and MKL's own; what MKL's was (0: OpenMP's)."""
    torch.get_num_threads()  # at its first look a thread takes the process's number
    set_number = _set_number()
    assert set_number is not None
    set_number(count)
    local = _mkl_local()
    return local(mkl) if local else 0


@functools.cache
def _set_number() -> Callable[[int], object] | None:
    """OpenMP's call for the number of threads, if what it is told shows in torch."""
    try:
        # Loaded for all to see, as torch's libraries share one runtime.
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
    """What a parallel region is compiled to, in GNU's OpenMP and for its programs in LLVM's."""
    try:
        return ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None


@functools.cache
def _mkl_local() -> Callable[[int], int] | None:
    """MKL's call for this thread's number, which `torch.set_num_threads` makes too."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).MKL_Set_Num_Threads_Local
    except (AttributeError, OSError):
        return None

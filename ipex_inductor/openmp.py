"""How many threads OpenMP gives what this thread calls; torch's own setting is the process's."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

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

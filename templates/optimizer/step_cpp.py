"""C++ step kernels as functions, and the tables that a call takes."""

import ctypes
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.templates.build.cpp import load

CHUNK = 1 << 16  # elements that a thread processes at a time
ALONE = 1 << 15  # elements in total, up to which one thread is faster than several


def function_of(
    source: Callable[[], str], problem: Mapping[str, Any], name: str = "step"
) -> Callable[..., None]:
    """Return the function `name` of a library, compiled or from the cache. Raises `NotBuiltError`.

    Args:
        source: returns the C++ source.
        problem: names the library in the cache.
        name: the function's name.
    """
    function = getattr(load(source, pairs(problem)), name)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (pointer, number, pointer, number, pointer, number)
    function.restype = None
    return cast(Callable[..., None], function)


class Table:
    """Tensors that one call steps: a row of addresses each, split into chunks for threads."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self.rows, self.chunks = array("q"), array("q")
        self.count = self._elements = 0
        self._chunk = chunk

    def add(self, row: Iterable[int], elements: int) -> None:
        """Add a row of addresses, of tensors with that many elements."""
        for begin in range(0, elements, self._chunk):
            self.chunks.extend((self.count, begin, min(begin + self._chunk, elements)))
        self.rows.extend(row)
        self.count += 1
        self._elements += elements

    def step(
        self, function: Callable[..., None], rows: "array[int]", numbers: "array[float]"
    ) -> None:
        """Call `function` on `rows`, laid out as this table's, and the groups' numbers."""
        function(
            rows.buffer_info()[0],
            self.count,
            self.chunks.buffer_info()[0],
            len(self.chunks) // 3,
            numbers.buffer_info()[0],
            torch.get_num_threads() if self._elements > ALONE else 1,
        )


def is_dense(tensor: Tensor) -> bool:
    """Return whether elements fill a block of memory, each once, in any order."""
    return tensor.is_contiguous() or fill_block(tensor.shape, tensor.stride())


def fill_block(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements of these sizes and strides fill a block of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

"""The step of an optimizer that was read from a graph, as one kernel for all tensors of a kind."""

import bisect
import ctypes
import functools
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.ops.update import Number, Program, Row, Update
from ipex_inductor.templates.cpp import load
from ipex_inductor.templates.step import update_source

log = logging.getLogger("ipex_inductor")

CHUNK = 1 << 16  # elements that one thread takes at a time
ALONE = 1 << 15  # elements in all, up to which one thread is faster than several

Look = tuple[torch.dtype, tuple[int, ...], int]


class Launch:
    """A compiled graph: one call of a kernel for each update.

    Each call looks where the tensors lie now. Where they are no longer what the program was made
    for (another dtype or layout, shared memory) the graph itself runs, op by op.
    Raises `NotBuiltError`.
    """

    def __init__(self, gm: torch.fx.GraphModule, program: Program, examples: list[Tensor]) -> None:
        self.gm = gm
        self.program = program
        self.kernels = [_Kernel(u, rows, examples) for u, rows in program.updates.items()]
        self.written = frozenset(program.written)
        self.looks = [_look(t) for t in examples]
        self.reach = [_reach(t) for t in examples]
        self.staged = _unlike(program, examples)
        self.addresses: list[int] = []  # of what is given, as they were when nothing was shared
        self.spans: list[tuple[int, int]] = []
        self.said = False

    def __call__(self, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        """What the graph returns, after all is written that it writes."""
        held = self.gm._buffers | self.gm._parameters
        given: list[Any] = [*inputs, *(held[name] for name in self.program.attributes)]
        addresses = [t.data_ptr() for t in given]
        if [_look(t) for t in given] != self.looks:
            return self._op_by_op("a tensor has another dtype or layout than it had", inputs)
        if self._shares(addresses):
            return self._op_by_op("tensors that are written share memory", inputs)
        return self._run(given, addresses)

    @torch.no_grad()
    def _run(self, given: Sequence[Any], addresses: list[int]) -> tuple[Tensor | None, ...]:
        made = [
            torch.empty_strided(m.shape, m.strides, dtype=getattr(torch, m.dtype), device="cpu")
            for m in self.program.made
        ]
        operands = [*given, *made]
        addresses += [t.data_ptr() for t in made]
        stages = {n: _in_order(operands[n], strides) for n, strides in self.staged.items()}
        for n, stage in stages.items():
            addresses[n] = stage.data_ptr()
        for kernel in self.kernels:
            kernel(addresses, given)
        for n, stage in stages.items():
            if n >= len(given) or n in self.written:
                operands[n].copy_(stage)
        torch.autograd.graph.increment_version([given[n] for n in self.written])
        return tuple(None if n is None else operands[n] for n in self.program.outputs)

    def _shares(self, addresses: list[int]) -> bool:
        """Whether anything lies in memory that is written, but for the tensor itself.

        Most calls meet known addresses but for gradients, which nobody writes.
        """
        last, self.addresses = self.addresses, addresses.copy()
        if not last or any(addresses[n] != last[n] for n in self.written):
            self.spans = sorted(
                (addresses[n], addresses[n] + self.reach[n]) for n in self.written if self.reach[n]
            )
            if any(end > after for (_, end), (after, _) in zip(self.spans, self.spans[1:])):
                self.addresses = []
                return True
            last = []
        for n, begin in enumerate(addresses):
            if n in self.written or (last and begin == last[n]) or not self.reach[n]:
                continue
            at = bisect.bisect_left(self.spans, (begin + self.reach[n], 0))  # begins after it
            if at and self.spans[at - 1][1] > begin:
                self.addresses = []
                return True
        return False

    def _op_by_op(self, reason: str, inputs: Sequence[Tensor]) -> Any:
        if not self.said:
            self.said = True
            log.info("an optimizer's step runs op by op: %s", reason)
        return self.gm(*inputs)


class _Kernel:
    """The rows of one update, and how they are divided."""

    def __init__(self, update: Update, rows: Sequence[Row], examples: Sequence[Tensor]) -> None:
        self.call = _library(update)
        self.width = len(update.columns) + 2
        self.count = len(rows)
        self.chunks = array("q")
        self.places: list[tuple[int, int]] = []  # in the rows, with the operand whose address
        self.rows = array("q", bytes(8 * self.width * self.count))
        numbers: dict[tuple[Number, ...], int] = {}
        self.elements = 0
        for index, row in enumerate(rows):
            begin = index * self.width
            steps = () if row.step is None else (row.step,)
            self.places += [(begin + n, operand) for n, operand in enumerate((*row.columns, *steps))]
            group = numbers.setdefault(_apart(row.numbers), len(numbers))
            self.rows[begin + self.width - 1] = group
            size = examples[row.columns[0]].numel()
            self.elements += size
            for at in range(0, size, CHUNK):
                self.chunks.extend((index, at, min(at + CHUNK, size)))
        self.numbers = [n for group in numbers for _, n in group]

    def __call__(self, addresses: Sequence[int], given: Sequence[Tensor]) -> None:
        """One call for all rows. Threads may be in here at once."""
        rows = array("q", self.rows)
        for place, operand in self.places:
            rows[place] = addresses[operand]
        numbers = array("d", (n if type(n) is float else given[int(n)].item() for n in self.numbers))
        self.call(
            rows.buffer_info()[0],
            self.count,
            self.chunks.buffer_info()[0],
            len(self.chunks) // 3,
            numbers.buffer_info()[0],
            torch.get_num_threads() if self.elements > ALONE else 1,
        )


def _apart(numbers: tuple[Number, ...]) -> tuple[tuple[type, Number], ...]:
    """So that operand 1 is another than 1.0."""
    return tuple((type(n), n) for n in numbers)


@functools.lru_cache(maxsize=256)
def _library(update: Update) -> Callable[..., None]:
    problem = {"template": "update", **vars(update)}
    step = load(functools.partial(update_source, update), pairs(problem)).step
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    step.argtypes = (pointer, number, pointer, number, pointer, number)
    step.restype = None
    return step


def _look(tensor: Tensor) -> Look:
    return tensor.dtype, tensor.stride(), tensor.numel()


def _reach(tensor: Tensor) -> int:
    """The bytes from its first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum(n * stride - stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _unlike(program: Program, examples: Sequence[Tensor]) -> dict[int, tuple[int, ...]]:
    """Operands in another layout than their row's, and the strides of that: those of its `param`,
    unless that has gaps."""
    found: dict[int, tuple[int, ...]] = {}
    for row in (row for rows in program.updates.values() for row in rows):
        param = examples[row.columns[0]]
        order = param.stride() if _is_dense(param) else _contiguous(param.shape)
        for n in row.columns:
            plain = examples[n].is_contiguous() and param.is_contiguous()
            if examples[n].stride() != order and not plain:
                found[n] = order
    return found


def _in_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with those strides."""
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a block of memory, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()

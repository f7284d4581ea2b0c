"""Optimizer updates on an NVIDIA GPU: two launches each, without synchronization."""

import functools
from array import array
from collections.abc import Callable, Sequence
from operator import itemgetter, or_

import torch
from torch import Tensor

from ipex_inductor.errors import DeviceError
from ipex_inductor.lowerings.optimizer.step_rows import bits
from ipex_inductor.ops.optimizer.update import HostScalar, Row, Update
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.cpp import NotBuiltError, require_found
from ipex_inductor.templates.optimizer.step_cuda import (
    ROWS,
    VECTOR,
    On,
    Room,
    Sent,
    chunks_of,
    load_triton_kernel,
    tile,
)
from ipex_inductor.templates.optimizer.update_triton import (
    scalars_signature,
    step_signature,
    table_names,
    update_triton_source,
)

WORD = 8  # bytes
EVEN = VECTOR // WORD


_captured: list["CudaKernel"] = []  # kept forever, as captured graphs may read their tables


class CudaKernel:
    """One update of all its rows: a launch that computes their scalars, then one for the elements.

    A CUDA graph may capture both, as they read steps and rates from device memory.

    Raises:
        NotBuiltError: a kernel could not be built.
    """

    def __init__(self, update: Update, rows: Sequence[Row], examples: Sequence[Tensor]) -> None:
        self._update, self._device = update, examples[rows[0].columns[0]].device
        self._scalars = _kernel(update, self._device, "scalars")
        _kernel(update, self._device, "step")
        self._count, self._width = len(rows), len(update.columns) + 1
        block, _ = tile(update.columns)
        self._blocks = [-(-examples[row.columns[0]].numel() // block) for row in rows]
        self._words = _Words(update, rows, examples)
        self._sent = Sent(self._device)
        self._chunks: dict[frozenset[int], list[tuple[cuda.Kernel, Room]]] = {}
        self._table: Room | None = None

    def ready(self, addresses: Sequence[int], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Return the launches on the current stream; every step that can fail is already done.

        Args:
            addresses: address of each operand.
            tensors: tensors of the inputs and the attributes, in the operands' order.

        Raises:
            NotBuiltError: a kernel could not be built.
            DeviceError: a graph is captured before any step ran.
        """
        table_words = self._words.of(addresses, tensors)
        launches = self._launches(table_words)
        assert self._table is not None
        with On(self._device) as stream:
            begin, table = self._sent.address(table_words, stream), self._table.address(stream)
            arguments = [(step, len(chunks), chunks.address(stream)) for step, chunks in launches]
        if torch.cuda.is_current_stream_capturing() and self not in _captured:
            _captured.append(self)
        steps, numbers = (begin + WORD * at for at in (self._words.steps, self._words.numbers))

        def launch() -> None:
            blocks = -(-self._count // ROWS)
            self._scalars(blocks, stream, (steps, self._count, numbers, table))
            for step, count, chunks in arguments:
                step(count, stream, (begin, chunks, table))

        return launch

    def _launches(self, table_words: "array[int]") -> list[tuple[cuda.Kernel, Room]]:
        """Return a kernel for rows of whole vectors and one for others, with the chunks of each."""
        loose = self._loose(table_words)
        if loose not in self._chunks:
            if torch.cuda.is_current_stream_capturing():
                remedy = "Take a step outside of the graph first, with tensors aligned as they are."
                raise DeviceError("a step that ran before", "one that is captured", remedy)
            self._chunks[loose] = [
                (
                    _kernel(self._update, self._device, "step", aligned),
                    Room(chunks_of(array("q", blocks), self._device)),
                )
                for aligned, blocks in self._split(loose)
                if any(blocks)
            ]
        if self._table is None:
            size = self._count * len(table_names(self._update))
            real = getattr(torch, self._update.real)
            self._table = Room(torch.empty(size, dtype=real, device=self._device))
        return self._chunks[loose]

    def _loose(self, table_words: "array[int]") -> frozenset[int]:
        """Return the rows that have an address that is not aligned to a vector."""
        end = self._count * self._width
        columns = [
            table_words[column_index : end : self._width] for column_index in range(self._width - 1)
        ]
        if not any(functools.reduce(or_, column) % VECTOR for column in columns):
            return frozenset()
        rows = enumerate(zip(*columns, strict=True))
        return frozenset(row for row, addresses in rows if any(a % VECTOR for a in addresses))

    def _split(self, loose: frozenset[int]) -> list[tuple[bool, list[int]]]:
        """Return the blocks of each row, for the aligned kernel and for the other one."""
        numbered = [*enumerate(self._blocks)]
        return [
            (True, [0 if row in loose else blocks for row, blocks in numbered]),
            (False, [blocks if row in loose else 0 for row, blocks in numbered]),
        ]


class _Words:
    """Words that are sent to kernels in one piece: rows, then their steps and groups, then numbers.

    `steps` and `numbers` are the indices at which these parts begin.
    """

    def __init__(self, update: Update, rows: Sequence[Row], examples: Sequence[Tensor]) -> None:
        groups = {row.numbers: None for row in rows}
        numbered = {numbers: place for place, numbers in enumerate(groups)}
        numbers = [n for group in groups for n in group]
        dtypes = [dtype for _, dtype in update.numbers] * len(groups)
        typed_numbers = zip(numbers, dtypes, strict=True)
        read = [n.operand for n, dtype in typed_numbers if isinstance(n, HostScalar) and not dtype]
        self._read = {operand: place for place, operand in enumerate(dict.fromkeys(read))}
        self._constants: dict[int, int] = {}
        self._begin = len(examples), len(examples) + len(self._read)
        sources: list[int] = []
        for row in rows:
            sources += (*row.columns, self._constant(examples[row.columns[0]].numel()))
        sources += [self._constant(0)] * (-len(sources) % EVEN)
        self.steps = len(sources)
        for row in rows:
            step = self._constant(0) if row.step is None else row.step
            sources += (step, self._constant(numbered[row.numbers]))
        self.numbers = len(sources)
        sources += map(self._number, numbers)
        self._pick = itemgetter(*sources)

    def of(self, addresses: Sequence[int], tensors: Sequence[Tensor]) -> "array[int]":
        """Return the words with the operands' addresses, reading the numbers held by the host."""
        read = (bits(float(tensors[n])) for n in self._read)
        return array("q", self._pick([*addresses, *read, *self._constants]))

    def _number(self, number: float | HostScalar) -> int:
        if not isinstance(number, HostScalar):
            return self._constant(bits(number))
        place = self._read.get(number.operand)
        return number.operand if place is None else self._begin[0] + place

    def _constant(self, value: int) -> int:
        return self._begin[1] + self._constants.setdefault(value, len(self._constants))


def _kernel(update: Update, device: torch.device, name: str, aligned: bool = True) -> cuda.Kernel:
    return require_found(_kernel_or_why(update, device, name, aligned))


@functools.lru_cache(maxsize=256)
def _kernel_or_why(
    update: Update, device: torch.device, name: str, aligned: bool
) -> cuda.Kernel | str:
    block, warps = tile(update.columns)
    elements = {"ALIGNED": VECTOR if aligned else 1, "BLOCK": block}
    signature = step_signature if name == "step" else scalars_signature
    try:
        return load_triton_kernel(
            update_triton_source(update),
            name,
            device,
            {"template": "update", **vars(update)},
            signature(update),
            elements if name == "step" else {"BLOCK": ROWS},
            warps if name == "step" else 1,
        )
    except NotBuiltError as error:
        return str(error)

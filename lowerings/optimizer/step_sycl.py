"""Optimizer updates on an Intel GPU: two launches each, without synchronization."""

import functools
from array import array
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from ipex_inductor.lowerings.optimizer.step_rows import Rows, bits
from ipex_inductor.ops.optimizer.update import HostScalar, Row, Update
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.sycl.step import CHUNK, Sent, update_of


class SyclKernel:
    """One update of all its rows: a launch that computes their scalars, then one for the elements.

    Numbers that tensors on the device hold are read there.

    Raises:
        NotBuiltError: a kernel could not be built.
    """

    def __init__(self, update: Update, rows: Sequence[Row], examples: Sequence[Tensor]) -> None:
        self._device = examples[rows[0].columns[0]].device
        self._step = update_of(update, self._device)
        self._rows = Rows(rows, examples, CHUNK)
        dtypes = cycle(dtype for _, dtype in update.numbers)
        self._numbers = [*zip(self._rows.numbers, dtypes, strict=False)]
        self._sent = [Sent(self._device) for _ in range(3)]

    def ready(self, addresses: Sequence[int], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Return the launches on the current stream, with tables that are sent or being sent.

        Args:
            addresses: address of each operand.
            tensors: tensors of the inputs and the attributes, in the operands' order.

        Raises:
            NotBuiltError: a graph is captured, which would keep the tables of this step.
        """
        if self._device.type == "xpu" and torch.xpu.is_current_stream_capturing():
            raise NotBuiltError("a graph is captured, but kernel tables belong to one step")
        numbers = array("q", (self._word(n, on, addresses, tensors) for n, on in self._numbers))
        table = self._rows.table
        tables = self._rows.at(addresses), table.chunks, numbers
        rows, chunks, sent = (
            send(table_words) for send, table_words in zip(self._sent, tables, strict=True)
        )
        run = functools.partial(self._step.run, rows, table.count, chunks, len(table.chunks) // 3)
        return functools.partial(run, self._step.table(table.count), sent)

    def _word(
        self,
        number: float | HostScalar,
        device_dtype: str,
        addresses: Sequence[int],
        tensors: Sequence[Tensor],
    ) -> int:
        """Return a number's bits, or the address of a number that the device holds.

        Args:
            number: number, or the operand that holds it.
            device_dtype: dtype of the tensor on the device; "" if the host holds the number.
            addresses: address of each operand.
            tensors: tensors of the inputs and the attributes, in the operands' order.
        """
        if not isinstance(number, HostScalar):
            return bits(number)
        return addresses[number.operand] if device_dtype else bits(float(tensors[number.operand]))

"""Small tables of the host that kernels of a GPU read."""

from array import array
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.errors import DeviceError


class Sent:
    """A table on a GPU as it was last sent there; the host never waits for it.

    A CUDA graph sends its own at each replay, from memory that is its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[array[Any], torch.cuda.Stream] | None = None
        self._there: Tensor | None = None
        self._spare: Tensor | None = None  # pinned: none can be had while a graph is captured
        self._captured: list[Tensor] = []

    def address(self, values: "array[Any]", stream: torch.cuda.Stream) -> int:
        """Where kernels on `stream`, the current one, find `values`."""
        if torch.cuda.is_current_stream_capturing():
            return self._capture(values)
        if self._known is None or self._known != (values, stream):
            pinned = _bytes(values).pin_memory()
            self._there = pinned.to(self._device, non_blocking=True)
            self._known = values[:], stream
        if self._spare is None or len(self._spare) != len(values) * values.itemsize:
            self._spare = _bytes(values).pin_memory()
        assert self._there is not None
        return self._there.data_ptr()

    def _capture(self, values: "array[Any]") -> int:
        spare, self._spare = self._spare, None
        if spare is None or len(spare) != len(values) * values.itemsize:
            todo = "Take a step outside of the graph first, and between two captures."
            raise DeviceError("a step that ran before", "one that is captured", todo)
        spare.copy_(_bytes(values))
        there = spare.to(self._device, non_blocking=True)
        self._captured += [spare, there]
        return there.data_ptr()


def _bytes(values: "array[Any]") -> Tensor:
    return torch.frombuffer(values, dtype=torch.uint8)

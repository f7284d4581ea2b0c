"""Optimizer step that was read from a graph, as one kernel for all tensors of a kind."""

import bisect
import functools
import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ipex_inductor.lowerings.optimizer.step_cuda import CudaKernel
from ipex_inductor.lowerings.optimizer.step_rows import Rows
from ipex_inductor.ops.optimizer.update import HostScalar, Program, Row, Update
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.optimizer.step import update_source
from ipex_inductor.templates.optimizer.step_cpp import function_of, is_dense
from ipex_inductor.templates.optimizer.step_cuda import has_kernels
from ipex_inductor.templates.optimizer.update_triton import update_triton_source

log = logging.getLogger("ipex_inductor")


class Kernel(Protocol):
    """Protocol of the kernel of one update for all its rows."""

    def ready(self, addresses: Sequence[int], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that runs the update; every step that can fail is already done.

        Args:
            addresses: address of each operand.
            tensors: tensors of the inputs and the attributes, in the operands' order.

        Raises:
            NotBuiltError: a kernel could not be built.
        """


def launch(
    gm: torch.fx.GraphModule, program: Program, examples: list[Tensor], sycl: bool = False
) -> "Launch | str":
    """Return `gm` as calls of kernels, or the reason why there are none.

    Args:
        gm: graph of the step.
        program: updates that `gm` was read as.
        examples: operands of the graph, or fake ones.
        sycl: whether to use SYCL kernels on the CPU if they are available.
    """
    fallback = ""
    if sycl and program.device == "cpu":
        try:
            return Launch(gm, program, examples, "sycl", "kernels in SYCL")
        except NotBuiltError as error:
            fallback = f"kernels in C++: {error}"
            log.warning("an optimizer's step: %s", fallback)
    try:
        return Launch(gm, program, examples, torch.device(program.device).type, fallback)
    except NotBuiltError as error:
        return str(error)


class Launch:
    """Run a compiled graph as one call of a kernel for each update of its program.

    Each call reads the current addresses of the tensors. If dtypes or layouts differ from the
    ones that the program was compiled for, or written memory is shared, the graph itself runs
    op by op.

    Args:
        gm: graph of the step.
        program: updates that `gm` was read as.
        examples: operands of the graph, or fake ones.
        kind: one of `KINDS`.
        chosen: why this kind was chosen, if there is a choice.

    Raises:
        NotBuiltError: there is no kernel for the device, or it could not be built.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        program: Program,
        examples: list[Tensor],
        kind: str,
        chosen: str = "",
    ) -> None:
        self.gm = gm
        self.chosen = chosen
        self.program = program
        self.device = torch.device(program.device)
        if kind not in KINDS or not has_kernels(self.device):
            raise NotBuiltError(f"no kernel for {self.device.type} yet")
        kernel_class, self._source = KINDS[kind]
        self.kernels = [kernel_class(u, rows, examples) for u, rows in program.updates.items()]
        self.looks = [_look(t) for t in examples[: len(examples) - len(program.allocated)]]
        self.reach = [_reach(t) for t in examples]
        self.staged = _find_staged(program, examples)
        self.last: list[int] = []  # addresses of the last operands without shared memory
        self.spans: list[tuple[int, int]] = []  # spans of the memory that was written then
        self.said = False
        self._lock = threading.Lock()

    @property
    def source(self) -> str:
        """Source of the kernels."""
        return "\n".join(map(self._source, self.program.updates))

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the graph's results after all writes; on a GPU they are queued on its stream."""
        attributes = self.gm._buffers | self.gm._parameters
        tensors: list[Any] = [*inputs, *(attributes[name] for name in self.program.attributes)]
        if [_look(t) for t in tensors] != self.looks:
            return self._op_by_op("a tensor's dtype, layout or device changed", inputs)
        addresses = [t.data_ptr() for t in tensors]
        if self._shares(addresses):
            return self._op_by_op("memory that is written is shared", inputs)
        try:
            with self._on_device():
                return self._run(tensors, addresses)
        except NotBuiltError as error:  # Nothing is written yet.
            return self._op_by_op(str(error), inputs)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the device current; on a GPU one thread at a time uses the kernels' buffers."""
        if self.device.type == "cpu":
            yield
            return
        with self._lock, torch.get_device_module(self.device).device(self.device):
            yield

    @torch.no_grad()
    def _run(self, tensors: list[Any], addresses: list[int]) -> list[Tensor | None]:
        program = self.program
        operands = tensors + [
            torch.empty_strided(
                m.shape, m.strides, dtype=getattr(torch, m.dtype), device=self.device
            )
            for m in program.allocated
        ]
        addresses = addresses + [t.data_ptr() for t in operands[len(tensors) :]]
        stages = {n: _in_order(operands[n], strides) for n, strides in self.staged.items()}
        for n, stage in stages.items():
            addresses[n] = stage.data_ptr()
        for run in [kernel.ready(addresses, tensors) for kernel in self.kernels]:
            run()
        for n, stage in stages.items():
            if n in program.written or n >= len(tensors):
                operands[n].copy_(stage)
        torch.autograd.graph.increment_version([tensors[n] for n in program.written])
        return [None if n is None else operands[n] for n in program.outputs]

    def _shares(self, addresses: list[int]) -> bool:
        """Return whether an operand overlaps written memory, other than the tensor that is written.

        Most calls have the addresses of the last call, except for gradients.
        """
        last, self.last = self.last, []
        written, reach = self.program.written, self.reach
        if not last or any(addresses[n] != last[n] for n in written):
            last = []
            self.spans = sorted(
                (addresses[n], addresses[n] + reach[n]) for n in written if reach[n]
            )
            if any(end > begin for (_, end), (begin, _) in pairwise(self.spans)):
                return True
        written_operands = set(written)
        for n, begin in enumerate(addresses):
            if (last and begin == last[n]) or n in written_operands or not reach[n]:
                continue
            position = bisect.bisect_left(self.spans, (begin + reach[n], 0))
            if position and self.spans[position - 1][1] > begin:
                return True
        self.last = addresses
        return False

    def _op_by_op(self, reason: str, inputs: Sequence[Tensor]) -> Any:
        if not self.said:
            self.said = True
            log.info("an optimizer's step runs op by op: %s", reason)
        return self.gm(*inputs)


class _Kernel:
    """One update for all its rows, by a function with the signature of the C++ `step`."""

    def __init__(
        self,
        function_for: Callable[[Update], Callable[..., None]],
        update: Update,
        rows: Sequence[Row],
        examples: Sequence[Tensor],
    ) -> None:
        self.function, self.rows = function_for(update), Rows(rows, examples)

    def ready(self, addresses: Sequence[int], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Return one call for all rows, see `Kernel`.

        Several threads may call this at once.

        Args:
            addresses: address of each operand.
            tensors: tensors of the inputs and the attributes, in the operands' order.
        """
        rows, numbers = self.rows.at(addresses), self.rows.numbers
        values = (float(tensors[n.operand]) if isinstance(n, HostScalar) else n for n in numbers)
        return functools.partial(self.rows.table.step, self.function, rows, array("d", values))


@functools.lru_cache(maxsize=256)
def _library(update: Update) -> Callable[..., None]:
    source = functools.partial(update_source, update)
    return function_of(source, {"template": "update", **vars(update)})


@functools.lru_cache(maxsize=256)
def _in_sycl(update: Update) -> Callable[..., None]:
    from ipex_inductor.templates.sycl.step import update_function

    return update_function(update)


def _on_xpu(update: Update, rows: Sequence[Row], examples: Sequence[Tensor]) -> Kernel:
    from ipex_inductor.lowerings.optimizer.step_sycl import SyclKernel

    return SyclKernel(update, rows, examples)


def _sycl_source(update: Update) -> str:
    from ipex_inductor.templates.sycl.step import update_source

    return update_source(update).text


# Kernel class and source function by device type; "sycl" is for CPUs.
KINDS: dict[str, tuple[Callable[..., Kernel], Callable[[Update], str]]] = {
    "cpu": (functools.partial(_Kernel, _library), update_source),
    "cuda": (CudaKernel, update_triton_source),
    "sycl": (functools.partial(_Kernel, _in_sycl), _sycl_source),
    "xpu": (_on_xpu, _sycl_source),
}


def _look(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], int, torch.device]:
    return tensor.dtype, tensor.stride(), tensor.numel(), tensor.device


def _reach(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum(n * stride - stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _find_staged(program: Program, examples: Sequence[Tensor]) -> dict[int, tuple[int, ...]]:
    """Return the operands whose layout kernels do not take, with the strides of their copies.

    These are the strides of the row's `param`, or contiguous ones if `param` has gaps.
    """
    strides_by_operand: dict[int, tuple[int, ...]] = {}
    for row in (row for rows in program.updates.values() for row in rows):
        param = examples[row.columns[0]]
        contiguous = all(examples[n].is_contiguous() for n in row.columns)
        strides = param.stride() if is_dense(param) else _contiguous(param.shape)
        strides_by_operand |= {
            n: strides for n in row.columns if not contiguous and examples[n].stride() != strides
        }
    return strides_by_operand


def _in_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))

"""The step of an optimizer that was read from a graph, as one kernel for all tensors of a kind."""

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
from ipex_inductor.ops.update import Held, Program, Row, Update
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.optimizer.step import update_source
from ipex_inductor.templates.optimizer.step_cpp import function_of, is_dense
from ipex_inductor.templates.optimizer.step_cuda import has_kernels
from ipex_inductor.templates.optimizer.update_triton import update_triton_source

log = logging.getLogger("ipex_inductor")


class Kernel(Protocol):
    """One update of all its rows."""

    def ready(self, addresses: Sequence[int], given: Sequence[Tensor]) -> Callable[[], None]:
        """What runs it on operands at those addresses; all that can fail has happened.

        Raises `NotBuiltError`.
        """


def launch(
    gm: torch.fx.GraphModule, program: Program, examples: list[Tensor], sycl: bool = False
) -> "Launch | str":
    """`gm`, which is that program, as calls of kernels; or why there are none.

    `sycl`: on the CPU, kernels in SYCL if they can be had.
    """
    instead = ""
    if sycl and program.device == "cpu":
        try:
            return Launch(gm, program, examples, "sycl", "kernels in SYCL")
        except NotBuiltError as error:
            instead = f"kernels in C++: {error}"
            log.warning("an optimizer's step: %s", instead)
    try:
        return Launch(gm, program, examples, torch.device(program.device).type, instead)
    except NotBuiltError as error:
        return str(error)


class Launch:
    """A compiled graph: one call of a kernel for each update of its program.

    `examples` are its operands, or fake ones. Each call looks where the tensors lie now. Where they
    are not what the program was made for (other dtypes or layouts, written memory that is shared),
    the graph itself runs, op by op. `kind` is one of `KINDS`; `chosen` says why that, where it is
    not the only one. Raises `NotBuiltError`.
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
        made_kernel, self._source = KINDS[kind]
        self.kernels = [made_kernel(u, rows, examples) for u, rows in program.updates.items()]
        self.looks = [_look(t) for t in examples[: len(examples) - len(program.made)]]
        self.reach = [_reach(t) for t in examples]
        self.staged = _staged(program, examples)
        self.last: list[int] = []  # addresses of what is given, when nothing was shared
        self.spans: list[tuple[int, int]] = []  # of memory that is written, then
        self.said = False
        self._lock = threading.Lock()

    @property
    def source(self) -> str:
        """The kernels' source."""
        return "\n".join(map(self._source, self.program.updates))

    def __call__(self, *inputs: Tensor) -> Any:
        """What the graph returns, once all is written that it writes; on a GPU, on its stream."""
        attributes = self.gm._buffers | self.gm._parameters
        given: list[Any] = [*inputs, *(attributes[name] for name in self.program.attributes)]
        if [_look(t) for t in given] != self.looks:
            return self._op_by_op("a tensor is not of the dtype, layout and device it was", inputs)
        addresses = [t.data_ptr() for t in given]
        if self._shares(addresses):
            return self._op_by_op("memory that is written is shared", inputs)
        try:
            with self._there():
                return self._run(given, addresses)
        except NotBuiltError as error:  # nothing is written yet
            return self._op_by_op(str(error), inputs)

    @contextmanager
    def _there(self) -> Iterator[None]:
        """On the device; what lies on a GPU for kernels is one thread's at a time."""
        if self.device.type == "cpu":
            yield
            return
        with self._lock, torch.get_device_module(self.device).device(self.device):
            yield

    @torch.no_grad()
    def _run(self, given: list[Any], addresses: list[int]) -> list[Tensor | None]:
        program = self.program
        operands = given + [
            torch.empty_strided(
                m.shape, m.strides, dtype=getattr(torch, m.dtype), device=self.device
            )
            for m in program.made
        ]
        addresses = addresses + [t.data_ptr() for t in operands[len(given) :]]
        stages = {n: _in_order(operands[n], strides) for n, strides in self.staged.items()}
        for n, stage in stages.items():
            addresses[n] = stage.data_ptr()
        for run in [kernel.ready(addresses, given) for kernel in self.kernels]:
            run()
        for n, stage in stages.items():
            if n in program.written or n >= len(given):
                operands[n].copy_(stage)
        torch.autograd.graph.increment_version([given[n] for n in program.written])
        return [None if n is None else operands[n] for n in program.outputs]

    def _shares(self, addresses: list[int]) -> bool:
        """Whether anything lies in memory that is written, but for the tensor that is written.

        Most calls meet the addresses of the last, but for gradients.
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
        own = set(written)
        for n, begin in enumerate(addresses):
            if (last and begin == last[n]) or n in own or not reach[n]:
                continue
            after = bisect.bisect_left(self.spans, (begin + reach[n], 0))
            if after and self.spans[after - 1][1] > begin:
                return True
        self.last = addresses
        return False

    def _op_by_op(self, reason: str, inputs: Sequence[Tensor]) -> Any:
        if not self.said:
            self.said = True
            log.info("an optimizer's step runs op by op: %s", reason)
        return self.gm(*inputs)


class _Kernel:
    """One update of all its rows, by a function that is called as C++'s `step` is."""

    def __init__(
        self,
        function_for: Callable[[Update], Callable[..., None]],
        update: Update,
        rows: Sequence[Row],
        examples: Sequence[Tensor],
    ) -> None:
        self.function, self.rows = function_for(update), Rows(rows, examples)

    def ready(self, addresses: Sequence[int], given: Sequence[Tensor]) -> Callable[[], None]:
        """See `Kernel`: one call for all rows. Several threads may be in here."""
        rows, numbers = self.rows.at(addresses), self.rows.numbers
        values = (float(given[n.operand]) if isinstance(n, Held) else n for n in numbers)
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


# By the type of the device, or for its CPU by SYCL: kernels, and what they are made of.
KINDS: dict[str, tuple[Callable[..., Kernel], Callable[[Update], str]]] = {
    "cpu": (functools.partial(_Kernel, _library), update_source),
    "cuda": (CudaKernel, update_triton_source),
    "sycl": (functools.partial(_Kernel, _in_sycl), _sycl_source),
    "xpu": (_on_xpu, _sycl_source),
}


def _look(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], int, torch.device]:
    return tensor.dtype, tensor.stride(), tensor.numel(), tensor.device


def _reach(tensor: Tensor) -> int:
    """The bytes from its first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum(n * stride - stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _staged(program: Program, examples: Sequence[Tensor]) -> dict[int, tuple[int, ...]]:
    """Operands in another layout than kernels take, with the strides of the copies they get.

    Those are the strides of the row's `param`, unless that has gaps.
    """
    found: dict[int, tuple[int, ...]] = {}
    for row in (row for rows in program.updates.values() for row in rows):
        param = examples[row.columns[0]]
        plain = all(examples[n].is_contiguous() for n in row.columns)
        strides = param.stride() if is_dense(param) else _contiguous(param.shape)
        found |= {n: strides for n in row.columns if not plain and examples[n].stride() != strides}
    return found


def _in_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))

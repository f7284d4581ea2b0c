"""One pass over all gradients on a GPU: their norm, and whether one of them is not finite."""

import functools
import logging
import operator
import weakref
from array import array
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipex_inductor.optim.launching.launch_groups import Scalars
from ipex_inductor.optim.operands import REALS
from ipex_inductor.optim.plan_replay import is_capturing
from ipex_inductor.optim.shards import is_sharded
from ipex_inductor.optim.state_fingerprint import Look, gradients
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.cpp import NotBuiltError, require_found
from ipex_inductor.templates.optimizer.norm_triton import parts_signature, parts_source
from ipex_inductor.templates.optimizer.step import StepKernel
from ipex_inductor.templates.optimizer.step_cpp import is_dense
from ipex_inductor.templates.optimizer.step_cuda import (
    VECTOR,
    On,
    Room,
    Sent,
    chunks_of,
    has_kernels,
    load_triton_kernel,
)

log = logging.getLogger("ipex_inductor")

BLOCK, TURNS, WARPS = 2048, 8, 8  # elements of a block, blocks of a program, warps of a program
CHUNK = BLOCK * TURNS  # elements
REGISTERS = 80  # of a thread; the sums need 80, and the code after them would use 128
ROWS = 32 * WARPS  # rows whose scalars a program computes at a time, one a thread


class Clip(NamedTuple):
    """The norm of all gradients and the factor that clips them (fp64), on their device."""

    norm: Tensor
    factor: Tensor


# The facts of the last reading and its kernels, or None if torch does it. The key says whether the
# fingerprint covers all tensors; one of gradients alone has other facts.
_known: "weakref.WeakKeyDictionary[Optimizer, dict[bool, tuple[list[Any], Reading | None]]]"
_known = weakref.WeakKeyDictionary()
_deferred: "weakref.WeakKeyDictionary[Optimizer, Read]" = weakref.WeakKeyDictionary()
_captured: "list[Reading]" = []  # graphs may read their tables; the end of a graph is not known


def read_of(
    optimizer: Optimizer, clip: float | None, divisor: Tensor | None, fingerprint: Look | None
) -> "Read | None":
    """Return the pending or a new reading of the gradients for this step; the caller launches it.

    It computes their norm over `divisor` and the factor that clips it to `clip`, or it was
    deferred by `found_inf`. None if nothing is to be read, or if torch has to do it: gradients
    that are not all plain and on one GPU, or a graph capture before the first such reading.
    """
    pending = _deferred.get(optimizer)
    if (
        pending is not None
        and pending.clip == clip
        and pending.is_of(fingerprint or gradients(optimizer))
    ):
        return pending
    return None if clip is None else _read(optimizer, clip, divisor, False, fingerprint)


def found_inf(
    optimizer: Optimizer, scale: Tensor, clip: float | None, defer: bool = False
) -> Tensor | None:
    """Return a flag (fp32, on the device): 1 if a gradient is not finite, else 0, without a sync.

    With `defer` the step that follows or `settle` writes it, along with what `clip` needs, over
    `scale`. None if torch has to look: see `read_of`, or there are no gradients.
    """
    read = _read(optimizer, clip if defer else None, scale, True, None)
    if read is None:
        return None
    if defer:
        _deferred[optimizer] = read
    else:
        read.run()
    return read.found_inf


def get_deferred(optimizer: Optimizer) -> "Read | None":
    """Return the reading that `found_inf` has deferred to the step, or None."""
    return _deferred.get(optimizer)


def settle(optimizer: Optimizer) -> Tensor | None:
    """Launch a deferred reading if the step has not; return its flag, or None if there is none."""
    read = _deferred.pop(optimizer, None)
    if read is None:
        return None
    read.run()
    return read.found_inf


def _read(
    optimizer: Optimizer,
    clip: float | None,
    divisor: Tensor | None,
    looks: bool,
    fingerprint: Look | None,
) -> "Read | None":
    """Return a new reading, or None if torch has to read the gradients.

    Args:
        optimizer: the optimizer whose gradients are read.
        clip: the norm to clip to, or None.
        divisor: GradScaler's scale, or None.
        looks: whether the flag `found_inf` is written.
        fingerprint: state of the tensors if it is known.
    """
    current = _look_on_cuda(optimizer, fingerprint)
    if current is None or not current.grads:
        return None
    reading = _find_reading(optimizer, current, fingerprint is not None)
    if reading is None or not reading.takes(divisor):
        return None
    try:
        return Read(reading, current, clip, divisor, looks)
    except NotBuiltError as error:
        _tell(str(error))
        return None


def _look_on_cuda(optimizer: Optimizer, fingerprint: Look | None) -> Look | None:
    """Return the given or a new fingerprint of the gradients, or None if CUDA is not in use."""
    cuda_module: Any = torch.cuda
    return (fingerprint or gradients(optimizer)) if cuda_module.is_initialized() else None


def _find_reading(optimizer: Optimizer, fingerprint: Look, whole: bool) -> "Reading | None":
    """Return the cached reading of gradients of these forms, or a new one outside of capture."""
    by_kind, in_capture = _known.setdefault(optimizer, {}), is_capturing()
    if whole not in by_kind or by_kind[whole][0] != fingerprint.facts:
        if in_capture:  # a new one needs pinned memory, which capture forbids
            return None
        by_kind[whole] = fingerprint.facts, _make_reading(fingerprint.grads)
    _, reading = by_kind[whole]
    if in_capture and reading is not None and reading not in _captured:
        _captured.append(reading)
    return reading


def _make_reading(grads: list[Tensor]) -> "Reading | None":
    """Return a reading of `grads` if all are plain and on one GPU, else None."""
    devices = {grad.device for grad in grads}
    # This process holds a part of a DTensor, and the norm is of the whole tensor.
    plain = all(g.dtype in REALS and is_dense(g) and not is_sharded(g) for g in grads)
    if len(devices) != 1 or not plain:
        return None
    (device,) = devices
    return Reading(grads, device) if device.type == "cuda" and has_kernels(device) else None


@functools.cache
def _tell(reason: str) -> None:
    """Warn once that torch takes norms of gradients."""
    log.warning(
        "torch itself takes norms of gradients, and looks for what is not finite: %s", reason
    )


@functools.cache
def _tell_apart(reason: str) -> None:
    """Warn once that the scalars of a step take a launch of their own."""
    log.warning("the scalars of a step are a launch of their own: %s", reason)


class Read:
    """One reading of gradients, which is launched once, and the tensors that it writes.

    `clip`: the norm to clip to; no norm is computed without it. `looks`: `found_inf` is written.
    Raises `NotBuiltError`.
    """

    def __init__(
        self,
        reading: "Reading",
        fingerprint: Look,
        clip: float | None,
        divisor: Tensor | None,
        looks: bool,
    ) -> None:
        self.clip, self.clipped = clip, reading.allocate_clip() if clip is not None else None
        self.found_inf = reading.allocate_flag() if looks else None
        self._reading, self._divisor = reading, divisor
        # The reference keeps gradients in memory.
        self._grads, self._addresses = fingerprint.grads, fingerprint.addresses
        self._done = False
        reading.load(self.clip is not None, looks, None)

    def is_of(self, fingerprint: Look | None) -> bool:
        """Return whether `fingerprint` is of the gradients of this reading, and it has not run."""
        if fingerprint is None or self._done or fingerprint.addresses != self._addresses:
            return False
        return all(map(operator.is_, fingerprint.grads, self._grads))

    def run(self, scalars: "Scalars | None" = None, found_inf: Tensor | None = None) -> bool:
        """Launch the reading on the current stream unless it has run.

        Args:
            scalars: scalars of a step that may be computed in the same launch.
            found_inf: flag to use if this reading writes none itself.

        Returns:
            Whether `scalars` were computed.
        """
        if self._done:
            return False
        if scalars and not self.makes(scalars.kernel):
            scalars = None
        found_inf = found_inf if self.found_inf is None else self.found_inf
        looks = self.found_inf is not None
        self._reading.run(
            self._addresses, self.clip, self._divisor, self.clipped, found_inf, looks, scalars
        )
        self._done, self._grads = True, []
        return scalars is not None

    def makes(self, kernel: StepKernel) -> bool:
        """Return whether it can compute the scalars of `kernel`; loads the code for them."""
        try:
            self._reading.load(self.clip is not None, self.found_inf is not None, kernel)
        except NotBuiltError as error:
            _tell_apart(str(error))
            return False
        return True


class Reading:
    """Kernels and memory that read gradients of given dtypes, sizes and alignments on one GPU."""

    def __init__(self, grads: list[Tensor], device: torch.device) -> None:
        self._device = device
        kinds = defaultdict(list)
        for number, grad in enumerate(grads):
            kinds[REALS[grad.dtype], grad.data_ptr() % VECTOR == 0].append(number)
        sizes = [grad.numel() for grad in grads]
        self._parts = [_Part(*kind, device, sizes, numbers) for kind, numbers in kinds.items()]
        self._real = "float64" if any(dtype == "float64" for dtype, _ in kinds) else "float32"
        self._count = sum(part.count for part in self._parts)
        self._sums = Room(torch.empty(self._count, dtype=torch.float64, device=device))
        self._counters: Room | None = None

    def takes(self, divisor: Tensor | None) -> bool:
        """Return whether kernels can read `divisor`: None, or fp32 on this GPU."""
        fits = divisor is not None and divisor.dtype is torch.float32
        return divisor is None or (fits and divisor.device == self._device)

    def allocate_clip(self) -> Clip:
        """Return memory for a norm, in fp32 (fp64 if a gradient is), and its clip factor."""
        norm = torch.empty((), dtype=getattr(torch, self._real), device=self._device)
        return Clip(norm, torch.empty((), dtype=torch.float64, device=self._device))

    def allocate_flag(self) -> Tensor:
        """Return memory for the flag of values that are not finite (fp32)."""
        return torch.empty((), dtype=torch.float32, device=self._device)

    def load(self, squares: bool, looks: bool, kernel: StepKernel | None) -> None:
        """Load the kernels that `run` needs; raises `NotBuiltError`."""
        for part in self._parts:
            part.kernel(self._real, squares, looks, kernel)

    def run(
        self,
        addresses: "array[int]",
        clip: float | None,
        divisor: Tensor | None,
        clipped: Clip | None,
        found_inf: Tensor | None,
        looks: bool,
        scalars: "Scalars | None",
    ) -> None:
        """Launch the kernels; all of them get the arguments of the last program's work.

        Args:
            addresses: of the gradients, in their order.
            clip: the norm to clip to, or None.
            divisor: GradScaler's scale (fp32), or None.
            clipped: memory for the norm and the clip factor, or None.
            found_inf: flag (fp32) of values that are not finite, or None.
            looks: whether `found_inf` is written; it is read otherwise.
            scalars: scalars of a step to compute as well, or None.
        """
        with On(self._device) as stream:
            scaler_tensors = (0 if t is None else t.data_ptr() for t in (divisor, found_inf))
            last: list[Any] = [self._count, *scaler_tensors]
            if clipped is not None:
                last += [clip, clipped.norm.data_ptr(), clipped.factor.data_ptr()]
            kernel = scalars.kernel if scalars else None
            last += scalars.arguments if scalars else ()
            counters, self._counters = self._counters or _counters(self._device), None
            sum_addresses = self._sums.address(stream), counters.address(stream)
            first_chunk = 0
            for part in self._parts:
                launch = part.kernel(self._real, clipped is not None, looks, kernel)
                arguments = (*part.tables(addresses, stream), *sum_addresses, first_chunk, *last)
                launch(part.count, stream, arguments)
                first_chunk += part.count
            self._counters = counters  # the last program has reset them to 0


def _counters(device: torch.device) -> Room:
    """Return zeroed counters: programs that are done, and whether a value is not finite."""
    return Room(torch.zeros(2, dtype=torch.int32, device=device))


class _Part:
    """Gradients of one dtype, all of them aligned or none, which one launch reads."""

    def __init__(
        self,
        dtype: str,
        aligned: bool,
        device: torch.device,
        sizes: list[int],
        numbers: list[int],
    ) -> None:
        self.kernel = functools.partial(parts, dtype, aligned, device)
        self._numbers = numbers
        self._rows = array("q", (n for number in numbers for n in (0, sizes[number])))
        # An empty gradient takes one program, so that a norm of 0 is written if all are empty.
        blocks = array("q", (-(-sizes[number] // CHUNK) or 1 for number in numbers))
        self.count = sum(blocks)
        self._chunks = Room(chunks_of(blocks, device))
        self._sent = Sent(device)

    def tables(self, addresses: "array[int]", stream: int) -> tuple[int, int]:
        """Return the addresses of the tables of rows and of chunks."""
        self._rows[::2] = array("q", (addresses[number] for number in self._numbers))
        return self._sent.address(self._rows, stream), self._chunks.address(stream)


@functools.lru_cache(maxsize=256)
def _parts_or_why(
    dtype: str,
    aligned: bool,
    device: torch.device,
    real: str,
    squares: bool,
    looks: bool,
    kernel: StepKernel | None,
) -> cuda.Kernel | str:
    problem: dict[str, Any] = {"template": "norm", "grad": dtype, "real": real}
    problem |= {"squares": squares, "looks": looks}
    problem |= {f"step {n}": v for n, v in kernel.problem.items()} if kernel else {}
    constants = {"ALIGNED": VECTOR if aligned else 1, "BLOCK": BLOCK, "TURNS": TURNS, "ROWS": ROWS}
    source = parts_source(dtype, real, squares, looks, kernel)
    types = parts_signature(real, squares, kernel)
    try:
        return load_triton_kernel(
            source, "parts", device, problem, types, constants, WARPS, REGISTERS
        )
    except NotBuiltError as error:
        return str(error)


def parts(*which: Any) -> cuda.Kernel:
    """Return the kernel that reads gradients of a dtype and alignment on a device; see `Reading`.

    Raises `NotBuiltError`.
    """
    return require_found(_parts_or_why(*which))

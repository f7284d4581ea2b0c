"""One reading of all gradients on a GPU: their norm, and whether one of them is not finite."""

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

from ipex_inductor.optim.launch_groups import Scalars
from ipex_inductor.optim.operands import REALS
from ipex_inductor.optim.plan_replay import capturing
from ipex_inductor.optim.shards import is_sharded
from ipex_inductor.optim.state_fingerprint import Look, gradients
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.cpp import NotBuiltError, given
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
    loaded,
)

log = logging.getLogger("ipex_inductor")

BLOCK, TURNS, WARPS = 2048, 8, 8  # elements of a program's block, and how many blocks it takes
CHUNK = BLOCK * TURNS
REGISTERS = 80  # that the sums take; what comes after them would take 128, and their places
ROWS = 32 * WARPS  # whose scalars a program makes at a time, one a thread


class Clip(NamedTuple):
    """The norm of all gradients, and what they are multiplied by (fp64), on their device."""

    norm: Tensor
    factor: Tensor


# Of the last reading: what it followed from, and how it is done, or that torch does it; a look at
# gradients alone has other facts than one at all.
_known: "weakref.WeakKeyDictionary[Optimizer, dict[bool, tuple[list[Any], Reading | None]]]"
_known = weakref.WeakKeyDictionary()
_deferred: "weakref.WeakKeyDictionary[Optimizer, Read]" = weakref.WeakKeyDictionary()
_captured: "list[Reading]" = []  # nobody says when a graph that may read their tables is gone


def read_of(
    optimizer: Optimizer, clip: float | None, divisor: Tensor | None, seen: Look | None
) -> "Read | None":
    """What reads the gradients, as they were `seen`, for this step; it is to be launched.

    For their norm over `divisor`, and what clips it to `clip`, or for what was `deferred`. None
    where nothing is to be read, or torch is to do it: not all plain and on one GPU, or not read so
    before a graph is captured.
    """
    left = _deferred.get(optimizer)
    if left is not None and left.clip == clip and left.is_of(seen or gradients(optimizer)):
        return left
    return None if clip is None else _read(optimizer, clip, divisor, False, seen)


def found_inf(
    optimizer: Optimizer, scale: Tensor, clip: float | None, defer: bool = False
) -> Tensor | None:
    """1 if a gradient is not finite, else 0 (fp32, on their device); nobody waits for it.

    If that may be `defer`red it is written by the step that follows, or by `settle`; with what
    `clip` needs, over `scale`. None where torch is to look: as with `read_of`, or there are none.
    """
    read = _read(optimizer, clip if defer else None, scale, True, None)
    if read is None:
        return None
    if defer:
        _deferred[optimizer] = read
    else:
        read.run()
    return read.found_inf


def deferred(optimizer: Optimizer) -> "Read | None":
    """What `found_inf` has left to the step."""
    return _deferred.get(optimizer)


def settle(optimizer: Optimizer) -> Tensor | None:
    """Nothing stays deferred, whatever became of the step: what was found, if something was."""
    read = _deferred.pop(optimizer, None)
    if read is None:
        return None
    read.run()
    return read.found_inf


def _read(
    optimizer: Optimizer, clip: float | None, divisor: Tensor | None, looks: bool, seen: Look | None
) -> "Read | None":
    now = _now(optimizer, seen)
    if now is None or not now.grads:
        return None
    reading = _reading(optimizer, now, seen is not None)
    if reading is None or not reading.takes(divisor):
        return None
    try:
        return Read(reading, now, clip, divisor, looks)
    except NotBuiltError as error:
        _tell(str(error))
        return None


def _now(optimizer: Optimizer, seen: Look | None) -> Look | None:
    here: Any = torch.cuda
    return (seen or gradients(optimizer)) if here.is_initialized() else None


def _reading(optimizer: Optimizer, seen: Look, whole: bool) -> "Reading | None":
    of, captured = _known.setdefault(optimizer, {}), capturing()
    if whole not in of or of[whole][0] != seen.facts:
        if captured:  # there is no pinned memory to be had for a new one
            return None
        of[whole] = seen.facts, _made(seen.grads)
    _, reading = of[whole]
    if captured and reading is not None and reading not in _captured:
        _captured.append(reading)
    return reading


def _made(grads: list[Tensor]) -> "Reading | None":
    devices = {grad.device for grad in grads}
    # Of a DTensor there is a part here, and a norm is of the whole.
    plain = all(g.dtype in REALS and is_dense(g) and not is_sharded(g) for g in grads)
    if len(devices) != 1 or not plain:
        return None
    (device,) = devices
    return Reading(grads, device) if device.type == "cuda" and has_kernels(device) else None


@functools.cache
def _tell(reason: str) -> None:
    log.warning(
        "torch itself takes norms of gradients, and looks for what is not finite: %s", reason
    )


@functools.cache
def _tell_apart(reason: str) -> None:
    log.warning("the scalars of a step are a launch of their own: %s", reason)


class Read:
    """One reading, which is launched once: what it writes then, and where from.

    `clip`: what the norm is clipped to; without, none is taken. `looks`: `found_inf` is written.
    Raises `NotBuiltError`.
    """

    def __init__(
        self,
        reading: "Reading",
        seen: Look,
        clip: float | None,
        divisor: Tensor | None,
        looks: bool,
    ) -> None:
        self.clip, self.clipped = clip, reading.clipped() if clip is not None else None
        self.found_inf = reading.found() if looks else None
        self._reading, self._divisor = reading, divisor
        self._grads, self._addresses = seen.grads, seen.addresses  # which are to stay in memory
        self._done = False
        reading.load(self.clip is not None, looks, None)

    def is_of(self, seen: Look | None) -> bool:
        """Whether these are its gradients."""
        if seen is None or self._done or seen.addresses != self._addresses:
            return False
        return all(map(operator.is_, seen.grads, self._grads))

    def run(self, scalars: "Scalars | None" = None, found_inf: Tensor | None = None) -> bool:
        """Read, on the current stream, unless that is done; returns whether `scalars` were made.

        `found_inf`: what somebody else found, for these.
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
        """Whether it can make the scalars of that kernel; what does so is loaded then."""
        try:
            self._reading.load(self.clip is not None, self.found_inf is not None, kernel)
        except NotBuiltError as error:
            _tell_apart(str(error))
            return False
        return True


class Reading:
    """Gradients of these forms, all on one GPU."""

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
        """Whether kernels can read it."""
        fits = divisor is not None and divisor.dtype is torch.float32
        return divisor is None or (fits and divisor.device == self._device)

    def clipped(self) -> Clip:
        """Room for a norm, in fp32 (fp64 if a gradient is), and what clips it."""
        norm = torch.empty((), dtype=getattr(torch, self._real), device=self._device)
        return Clip(norm, torch.empty((), dtype=torch.float64, device=self._device))

    def found(self) -> Tensor:
        """Room for what was found."""
        return torch.empty((), dtype=torch.float32, device=self._device)

    def load(self, squares: bool, looks: bool, kernel: StepKernel | None) -> None:
        """Have the kernels that `run` needs. Raises `NotBuiltError`."""
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
        """Launch them; what the last program does all of them are told."""
        with On(self._device) as stream:
            around = (0 if t is None else t.data_ptr() for t in (divisor, found_inf))
            last: list[Any] = [self._count, *around]
            if clipped is not None:
                last += [clip, clipped.norm.data_ptr(), clipped.factor.data_ptr()]
            kernel = scalars.kernel if scalars else None
            last += scalars.arguments if scalars else ()
            counters, self._counters = self._counters or _counters(self._device), None
            summed = self._sums.address(stream), counters.address(stream)
            before = 0
            for part in self._parts:
                launch = part.kernel(self._real, clipped is not None, looks, kernel)
                arguments = (*part.tables(addresses, stream), *summed, before, *last)
                launch(part.count, stream, arguments)
                before += part.count
            self._counters = counters  # 0 again, as all were launched


def _counters(device: torch.device) -> Room:
    """How many programs are done, and whether one found what is not finite."""
    return Room(torch.zeros(2, dtype=torch.int32, device=device))


class _Part:
    """Those of one dtype, all of them aligned or not: a launch."""

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
        # Where all are empty, somebody has to say that their norm is 0.
        blocks = array("q", (-(-sizes[number] // CHUNK) or 1 for number in numbers))
        self.count = sum(blocks)
        self._chunks = Room(chunks_of(blocks, device))
        self._sent = Sent(device)

    def tables(self, addresses: "array[int]", stream: int) -> tuple[int, int]:
        """Where kernels find rows, and chunks."""
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
        return loaded(source, "parts", device, problem, types, constants, WARPS, REGISTERS)
    except NotBuiltError as error:
        return str(error)


def parts(*which: Any) -> cuda.Kernel:
    """What reads gradients: their dtype, whether they are aligned, the device; see `Reading`.

    Raises `NotBuiltError`.
    """
    return given(_parts_or_why(*which))

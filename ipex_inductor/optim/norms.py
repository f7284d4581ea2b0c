"""One reading of all gradients on a GPU: their norm, and whether one of them is not finite."""

import functools
import logging
import weakref
from array import array
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipex_inductor.optim.again import capturing
from ipex_inductor.optim.look import Look, gradients
from ipex_inductor.optim.plan import REALS
from ipex_inductor.templates import cuda
from ipex_inductor.templates.cpp import NotBuiltError
from ipex_inductor.templates.norm_triton import PARTS, parts_source, total_signature, total_source
from ipex_inductor.templates.step_cpp import is_dense
from ipex_inductor.templates.step_cuda import VECTOR, Sent, chunks_of, has_kernels, loaded

log = logging.getLogger("ipex_inductor")

BLOCK, TURNS, WARPS = 2048, 8, 8  # elements of a program's block, and how many blocks it takes
CHUNK = BLOCK * TURNS


class Clip(NamedTuple):
    """The norm of all gradients, and what they are multiplied by (fp64), on their device."""

    norm: Tensor
    factor: Tensor


class Read(NamedTuple):
    """What was read of gradients, and as they were then."""

    clip: float
    stamps: list[Any]
    found: Clip


# Of the last reading: what it followed from, and how it is done, or that torch does it.
_known: "weakref.WeakKeyDictionary[Optimizer, tuple[list[Any], Reading | None]]"
_known = weakref.WeakKeyDictionary()
_read: "weakref.WeakKeyDictionary[Optimizer, Read]" = weakref.WeakKeyDictionary()


def norm_of(optimizer: Optimizer, clip: float, divisor: Tensor | None) -> Clip | None:
    """The norm of the gradients over `divisor`, and what clips it to `clip`.

    None where torch is to say so: not all plain and on one GPU, or a graph is captured.
    """
    last = _read.pop(optimizer, None)
    seen = _seen(optimizer)
    if seen is None:
        return None
    if last and last.clip == clip and last.stamps == _stamps(seen):
        return last.found
    reading = _reading(optimizer, seen)
    if reading is None or not reading.takes(divisor):
        return None
    try:
        return reading.clipped(seen.addresses, clip, divisor, None)
    except NotBuiltError as error:
        _tell(str(error))
        return None


def found_inf(optimizer: Optimizer, scale: Tensor, clip: float | None) -> Tensor | None:
    """1 if a gradient is not finite, else 0 (fp32, on their device); nobody waits for it.

    For `clip` the norm of the gradients over `scale` is taken as well; `norm_of` has it then, until
    one of them is written as torch sees it, or all is to be forgotten (`forget`). None where torch
    is to look: as with `norm_of`, or there are none.
    """
    seen = _seen(optimizer)
    reading = _reading(optimizer, seen) if seen and seen.grads else None
    if seen is None or reading is None or not reading.takes(scale):
        return None
    found = torch.zeros((), dtype=torch.float32, device=scale.device)
    try:
        if clip is None:
            reading.look(seen.addresses, found)
        else:
            clipped = reading.clipped(seen.addresses, clip, scale, found)
            _read[optimizer] = Read(clip, _stamps(seen), clipped)
    except NotBuiltError as error:
        _tell(str(error))
        return None
    return found


def forget(optimizer: Optimizer) -> None:
    """What was read is of no step to come."""
    _read.pop(optimizer, None)


def _seen(optimizer: Optimizer) -> Look | None:
    here: Any = torch.cuda
    return gradients(optimizer) if here.is_initialized() and not capturing() else None


def _stamps(seen: Look) -> list[Any]:
    """What tells that gradients were not written since; nothing does of an inference tensor."""
    if any(map(Tensor.is_inference, seen.grads)):
        return [object()]
    return [seen.addresses, *(grad._version for grad in seen.grads)]


def _reading(optimizer: Optimizer, seen: Look) -> "Reading | None":
    last = _known.get(optimizer)
    if last is None or last[0] != seen.facts:
        last = _known[optimizer] = seen.facts, _made(seen.grads)
    return last[1]


def _made(grads: list[Tensor]) -> "Reading | None":
    devices = {grad.device for grad in grads}
    plain = all(grad.dtype in REALS and is_dense(grad) for grad in grads)
    if len(devices) != 1 or not plain:
        return None
    (device,) = devices
    if device.type != "cuda" or not has_kernels(device):
        return None
    try:
        return Reading(grads, device)
    except NotBuiltError as error:
        _tell(str(error))
        return None


@functools.cache
def _tell(reason: str) -> None:
    log.warning(
        "torch itself takes norms of gradients, and looks for what is not finite: %s", reason
    )


class Reading:
    """Gradients of these forms, all on one GPU. Raises `NotBuiltError`."""

    def __init__(self, grads: list[Tensor], device: torch.device) -> None:
        self._device = device
        kinds = defaultdict(list)
        for number, grad in enumerate(grads):
            kinds[REALS[grad.dtype], grad.data_ptr() % VECTOR == 0].append(number)
        sizes = [grad.numel() for grad in grads]
        self._parts = [_Part(*kind, device, sizes, numbers) for kind, numbers in kinds.items()]
        self._real = "float64" if any(dtype == "float64" for dtype, _ in kinds) else "float32"
        self._total = _total(self._real, device)
        count = sum(part.count for part in self._parts)
        self._sums = torch.empty(count, dtype=torch.float64, device=device)

    def takes(self, divisor: Tensor | None) -> bool:
        """Whether kernels can read it."""
        fits = divisor is not None and divisor.dtype is torch.float32
        return divisor is None or (fits and divisor.device == self._device)

    def look(self, addresses: "array[int]", found: Tensor) -> None:
        """Write 1 to `found` if one of them is not finite."""
        self._run(addresses, None, found, squares=False)

    def clipped(
        self, addresses: "array[int]", clip: float, divisor: Tensor | None, found: Tensor | None
    ) -> Clip:
        """Their norm over `divisor`, in fp32 (fp64 if one of them is); `look` in passing."""
        norm = torch.empty((), dtype=getattr(torch, self._real), device=self._device)
        factor = torch.empty((), dtype=torch.float64, device=self._device)
        self._run(addresses, divisor, found, squares=True)
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream().cuda_stream
            sums, count = self._sums.data_ptr(), len(self._sums)
            self._total(1, stream, (sums, count, clip, norm.data_ptr(), factor.data_ptr()))
        return Clip(norm, factor)

    def _run(
        self, addresses: "array[int]", divisor: Tensor | None, found: Tensor | None, squares: bool
    ) -> None:
        sums = self._sums.data_ptr()
        around = [0 if t is None else t.data_ptr() for t in (divisor, found)]
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            for part in self._parts:
                part.run(addresses, sums, around, squares, found is not None, stream)
                sums += part.count * self._sums.element_size()


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
        self._kernel = functools.partial(_parts, dtype, aligned, device)
        self._kernel(True, False)
        self._numbers = numbers
        self._rows = array("q", (n for number in numbers for n in (0, sizes[number])))
        blocks = array("q", (-(-sizes[number] // CHUNK) for number in numbers))
        self.count = sum(blocks)
        self._chunks = chunks_of(blocks, device)
        self._sent = Sent(device)

    def run(
        self,
        addresses: "array[int]",
        sums: int,
        around: list[int],
        squares: bool,
        looks: bool,
        stream: torch.cuda.Stream,
    ) -> None:
        """Write a sum for each chunk, if `squares`, and what it `looks` for."""
        if not self.count:
            return
        self._rows[::2] = array("q", (addresses[number] for number in self._numbers))
        rows = self._sent.address(self._rows, stream)
        arguments = (rows, self._chunks.data_ptr(), sums, *around)
        self._kernel(squares, looks)(self.count, stream.cuda_stream, arguments)


@functools.lru_cache(maxsize=256)
def _parts(
    dtype: str, aligned: bool, device: torch.device, squares: bool, looks: bool
) -> cuda.Kernel:
    source = parts_source(dtype, squares, looks)
    problem = {"template": "norm", "grad": dtype, "squares": squares, "looks": looks}
    constants = {"ALIGNED": VECTOR if aligned else 1, "BLOCK": BLOCK, "TURNS": TURNS}
    return loaded(source, "parts", device, problem, PARTS, constants, WARPS)


@functools.lru_cache(maxsize=256)
def _total(real: str, device: torch.device) -> cuda.Kernel:
    problem = {"template": "norm", "grad": real}
    types = total_signature(real)
    return loaded(total_source(real), "total", device, problem, types, {"BLOCK": BLOCK}, WARPS)

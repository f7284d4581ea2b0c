"""FP8 with delayed scaling: quantize with a given scale, multiply, keep maxima and scales.

`fp8_quantize` and `fp8_gemm` are pure. `fp8_record`, `fp8_quantize_gradient` and `fp8_update` write
a scaling state: a tensor in fp32 with a column for each quantized tensor and the rows below. They
count no version of it, as a backward may read a state that a later pass has written.
"""

import functools
import threading
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.errors import DeviceError, QuantizationError
from ipex_inductor.ops.common.defining import mutable_op, op

SCALE, SCALE_INV, COUNT, HISTORY = range(4)  # rows of a state; the history is all that follow
UNIT = 16  # torch._scaled_mm takes multiples of it as K and N
DEVICES = ("cpu", "cuda")
CAPABILITY = (8, 9)  # the first of NVIDIA's with FP8 tensor cores


class Settings(NamedTuple):
    """Settings of an update, which ops take one by one.

    Args:
        margin: scales are divided by 2 to this power.
        most_recent: use the newest row, not the maximum of all.
        interval: scales are computed in the first of as many updates.
        length: rows of the history.
        group: name of the process group over which maxima are reduced, "" for none.
    """

    margin: int
    most_recent: bool
    interval: int
    length: int
    group: str


class Model(Protocol):
    """Owner of the states of one model: op arguments name it by a number."""

    def update_gradients(self, dtype: torch.dtype, settings: Settings) -> None:
        """Update the scales of gradients after a backward."""


MODELS: WeakValueDictionary[int, Model] = WeakValueDictionary()
"""Owners by number."""


class _Marks(threading.local):
    """Work of this thread that ops leave to the end of a pass."""

    def __init__(self) -> None:
        self.models: set[int] = set()  # those with maxima that were recorded


_marks = _Marks()
_backwards: set[tuple[int, int]] = set()  # numbers of a model and a backward that will update it
_backwards_lock = threading.Lock()


def take_recorded() -> list[Model]:
    """Return the models for which this thread recorded maxima since the last call."""
    numbers, _marks.models = sorted(_marks.models), set()
    return [MODELS[number] for number in numbers if number in MODELS]


def largest_finite(dtype: torch.dtype) -> float:
    """Return the largest finite number of an FP8 dtype: 448 or 57344."""
    return float(torch.finfo(dtype).max)


def compute_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude as one element in fp32; NaN if there is one, 0 if empty."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return x.detach().abs().amax().float()


def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = largest_finite(dtype)
    scaled = x.float() * scale
    return scaled.clamp(-largest, largest).to(dtype).contiguous()


@op("fp8_quantize")
def fp8_quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x * scale` in FP8, rounded to even and saturated, and the largest magnitude of x.

    Args:
        x: floating point of any shape.
        scale: one element in fp32.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        The values, contiguous, and one element in fp32 from the same read of x. NaN stays NaN.
    """
    return _quantize(x, scale, dtype), compute_amax(x)


@fp8_quantize.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    return values, torch.empty((), dtype=torch.float32, device=x.device)


@op("fp8_gemm")
def fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """Return `a @ b.T` of FP8 values, scaled back, accumulated in fp32 and rounded once.

    Args:
        a: [M, K] in FP8.
        b: [N, K] in FP8.
        a_scale_inv: one element, the reciprocal of the scale of a.
        b_scale_inv: one element, the reciprocal of the scale of b.
        bias: [N], or None. It is rounded to `dtype` first.
        dtype: of the result.
        fast_accumulation: lets NVIDIA's tensor cores keep fewer bits of partial sums.
    """
    if a.device.type == "cuda":
        return _multiply_on_cuda(
            a, b, (a_scale_inv, b_scale_inv), bias, dtype, fast_accumulation=fast_accumulation
        )
    if a.device.type not in DEVICES:
        raise DeviceError(
            "FP8 GEMMs on a CPU or a CUDA device", str(a.device), "Move the model to one of these."
        )
    with torch.autocast(a.device.type, enabled=False):  # it would multiply in bf16
        result = (a.float() @ b.float().t()) * (a_scale_inv * b_scale_inv)
    if bias is not None:
        result = result + bias.to(dtype).float()
    return result.to(dtype)


@fp8_gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def _multiply_on_cuda(
    a: Tensor,
    b: Tensor,
    scales_inv: tuple[Tensor, Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool,
) -> Tensor:
    """Return `fp8_gemm` by torch._scaled_mm: K and N are padded with zeros to multiples of 16.

    Args:
        a: [M, K] in FP8.
        b: [N, K] in FP8.
        scales_inv: of a and b.
        bias: [N], or None.
        dtype: of the result.
        fast_accumulation: as in `fp8_gemm`.
    """
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise QuantizationError(
            "at most one operand of a GEMM in E5M2 on CUDA devices",
            "two",
            "Use Format.HYBRID or Format.E4M3.",
        )
    capability = torch.cuda.get_device_capability(a.device)
    if capability < CAPABILITY:
        raise DeviceError(
            "compute capability 8.9 or later, which has FP8 tensor cores",
            ".".join(map(str, capability)),
            "Leave fp8_autocast disabled on this GPU.",
        )
    outs = b.shape[0]
    if 0 in (*a.shape, outs):
        empty = a.new_zeros(a.shape[0], outs, dtype=dtype)
        return empty if bias is None else empty + bias.to(dtype)
    fused = bias is not None and dtype != torch.float32  # what the library adds
    result: Tensor = torch._scaled_mm(
        _pad(a, rows=False),
        _pad(b, rows=True).t(),
        *scales_inv,
        bias=F.pad(bias.to(dtype), (0, -outs % UNIT)) if fused and bias is not None else None,
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )
    result = result[:, :outs]
    if bias is not None and not fused:
        result = result + bias.to(dtype)
    return result.contiguous()


def _pad(x: Tensor, *, rows: bool) -> Tensor:
    """Return a matrix row by row in memory, padded to multiples of 16 columns (and rows)."""
    below, right = (-x.shape[0] % UNIT if rows else 0), -x.shape[1] % UNIT
    if not (below or right):
        return x.contiguous()
    padded = x.new_zeros(x.shape[0] + below, x.shape[1] + right, dtype=torch.uint8)
    padded[: x.shape[0], : x.shape[1]] = x.view(torch.uint8)
    return padded.view(x.dtype)


@op("fp8_quantize_rows")
def fp8_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in E4M3, each row scaled by its largest magnitude, and the reciprocals of scales.

    Args:
        x: [..., K] in floating point: activations, or a weight with its output channels as rows.

    Returns:
        [..., K] in FP8, contiguous, and [..., 1] in fp32. A row of zeros has scale 1. A row with an
            infinite element or NaN becomes NaN.
    """
    exact = x.float()
    amax = exact.abs().amax(-1, keepdim=True) if x.shape[-1] else exact.new_zeros(*x.shape[:-1], 1)
    smallest = largest_finite(torch.float8_e4m3fn) * torch.finfo(torch.float32).tiny
    scale = torch.full_like(amax, largest_finite(torch.float8_e4m3fn)) / amax.clamp_min(smallest)
    scale = torch.where(amax > 0, scale, 1.0)
    return _quantize(exact, scale, torch.float8_e4m3fn), scale.reciprocal()


@fp8_quantize_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return values, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)


@op("fp8_gemm_rows")
def fp8_gemm_rows(
    a: Tensor,
    b: Tensor,
    a_scales_inv: Tensor,
    b_scales_inv: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return `a @ b.T` of FP8 values with a scale for each row, as `fp8_gemm` does.

    Args:
        a: [M, K] in E4M3.
        b: [N, K] in E4M3.
        a_scales_inv: [M, 1] in fp32.
        b_scales_inv: [N, 1] in fp32.
        bias: [N], or None.
        dtype: of the result.
    """
    one = a_scales_inv.new_ones(())
    result: Tensor = fp8_gemm(a, b, one, one, None, torch.float32, False)
    result = result * (a_scales_inv * b_scales_inv.t())
    if bias is not None:
        result = result + bias.to(dtype).float()
    return result.to(dtype)


@fp8_gemm_rows.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scales_inv: Tensor,
    b_scales_inv: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


_SETTINGS = "int margin, bool most_recent, int interval, int length, str group"


@mutable_op(
    "fp8_record(Tensor(a!) state, Tensor[] maxima, int column, int model) -> ()", lambda *_: None
)
def fp8_record(state: Tensor, maxima: list[Tensor], column: int, model: int) -> None:
    """Raise elements of the newest row of a history, and mark the model for the end of the pass.

    Args:
        state: [3 + length, tensors].
        maxima: one element each, of consecutive columns.
        column: the first column.
        model: number of the owner.
    """
    row = state.data[HISTORY, column : column + len(maxima)]
    row.copy_(torch.maximum(row, torch.stack(maxima)))
    _marks.models.add(model)


def _fake_of_gradient(
    gradient: Tensor, state: Tensor, column: int, dtype: torch.dtype, *settings: object
) -> tuple[Tensor, Tensor]:
    values = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    return values, torch.empty((), dtype=torch.float32, device=gradient.device)


@mutable_op(
    "fp8_quantize_gradient(Tensor gradient, Tensor(a!) state, int column, ScalarType dtype,"
    f" int model, {_SETTINGS}) -> (Tensor, Tensor)",
    _fake_of_gradient,
)
def fp8_quantize_gradient(
    gradient: Tensor,
    state: Tensor,
    column: int,
    dtype: torch.dtype,
    model: int,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    """Return a gradient in FP8 by the scale of its column, and the reciprocal of that scale.

    The largest magnitude is recorded. The scales are updated when the running backward ends.

    Args:
        gradient: floating point of any shape.
        state: [3 + length, layers].
        column: of the layer.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        model: number of the owner.
        settings: fields of `Settings`.
    """
    state = state.data  # has no version
    values = _quantize(gradient, state[SCALE, column], dtype)
    cell = state[HISTORY, column]
    cell.copy_(torch.maximum(cell, compute_amax(gradient)))
    _update_later(model, dtype, Settings(*settings))
    return values, state[SCALE_INV, column].clone()


def _update_later(model: int, dtype: torch.dtype, settings: Settings) -> None:
    """Update the scales of a model's gradients once, when the running backward ends."""
    owner, task = MODELS.get(model), compat.backward_number()
    if owner is not None and compat.runs_compiled_backward():
        raise QuantizationError(
            "a backward of autograd's engine, at whose end scales of gradients are updated",
            "one of compiled autograd",
            "Call backward() with torch._dynamo.config.compiled_autograd = False.",
        )
    if task is None or owner is None:
        return
    with _backwards_lock:
        if (model, task) in _backwards:
            return
        failed = [entry for entry in _backwards if entry[0] not in MODELS]  # of dead models
        _backwards.difference_update(failed)
        _backwards.add((model, task))
    compat.at_end_of_backward(functools.partial(_update, (model, task), owner, dtype, settings))


def _update(
    backward: tuple[int, int], owner: Model, dtype: torch.dtype, settings: Settings
) -> None:
    """Update the scales of a model's gradients at the end of a backward."""
    with _backwards_lock:
        _backwards.discard(backward)
    owner.update_gradients(dtype, settings)


def _fake_of_update(state: Tensor, largest: float, model: int, *settings: Any) -> Tensor:
    return state.new_empty(2, state.shape[1])


@mutable_op(
    f"fp8_update(Tensor(a!) state, float largest, int model, {_SETTINGS}) -> Tensor",
    _fake_of_update,
)
def fp8_update(state: Tensor, largest: float, model: int, *settings: Any) -> Tensor:
    """Compute scales from a history, then make room in it for the next pass.

    Returns the scales and their reciprocals [2, tensors] as a tensor of their own. Inductor would
    turn a clone of these rows in the graph into a view of the state.

    Args:
        state: [3 + length, tensors].
        largest: the largest finite number of the FP8 dtype.
        model: number of the owner whose pass ends, -1 for a state of gradients.
        settings: fields of `Settings`.
    """
    _marks.models.discard(model)
    state = state.data
    margin, most_recent, interval, _, group = Settings(*settings)
    history = state[HISTORY:]
    if group:
        compat.reduce_largest(history[0], group)
    amax = history[0] if most_recent else history.amax(0)
    due = state[COUNT] == 0
    # A number divided by a tensor would be multiplied by its reciprocal: rounded twice.
    scale = amax.new_full((), largest * 2.0**-margin) / amax
    limits = torch.finfo(torch.float32)
    scale = scale.clamp(max=limits.max)  # of an amax so small that it overflows
    # The reciprocal of a smaller scale is infinite.
    valid = amax.isfinite() & (amax > 0) & (scale >= limits.tiny)
    scale = torch.where(due & valid, scale, state[SCALE])
    rolled = history.roll(-1, 0)
    rolled[0] = 0
    state[SCALE] = scale
    state[SCALE_INV] = scale.reciprocal()
    state[COUNT] = (state[COUNT] + 1) % interval
    history.copy_(rolled)
    return torch.stack([state[SCALE], state[SCALE_INV]])

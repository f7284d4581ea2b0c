"""Scaling states of FP8 models: maxima that are recorded, and scales that follow them.

A state is a tensor in fp32 with a column for each quantized tensor and the rows below. Ops that
write one count no version of it, as a backward may read a state that a later pass has written.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.common.defining import light_op, mutable_op
from ipex_inductor.ops.quant.fp8 import ALIGNMENT

SCALE, SCALE_INV, COUNT, HISTORY = range(4)  # rows of a state; the history is all that follow
SPACE = ALIGNMENT // 4  # elements of a scale and of what keeps the next one apart


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

Update = Callable[[Tensor, float, Settings], Tensor | None]
KERNELS: dict[str, Update] = {}
"""Functions like `update_by_torch` in one kernel, by type of device; None if they cannot."""


class _Marks(threading.local):
    """Work of this thread that ops leave to the end of a pass."""

    def __init__(self) -> None:
        self.models: set[int] = set()  # those with maxima that were recorded


_marks = _Marks()
_backwards: set[tuple[int, int]] = set()  # numbers of a model and a backward that will update it
_backwards_lock = threading.Lock()


def take_recorded() -> list[Model]:
    """Return the models for which this thread recorded maxima since the last call."""
    if not _marks.models:
        return []
    numbers, _marks.models = sorted(_marks.models), set()
    return [MODELS[number] for number in numbers if number in MODELS]


def space_scales(state: Tensor) -> Tensor:
    """Return scales and reciprocals of a state as [2, tensors, 4]: each number four times.

    cuBLASLt reads scales at multiples of 16 bytes.
    """
    numbers = state[: SCALE_INV + 1].unsqueeze(-1)
    return numbers.expand(*numbers.shape[:-1], SPACE).contiguous()


@functools.lru_cache(maxsize=1024)
def find_blocks(columns: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return how columns repeat: blocks, columns of a block, from one block to the next.

    Args:
        columns: numbers of columns.

    Returns:
        None for columns that are no such blocks.
    """
    first = columns[0]
    width = next((n for n, c in enumerate(columns) if c != first + n), len(columns))
    blocks = len(columns) // width
    step = columns[width] - first if blocks > 1 else width
    regular = [first + step * block + n for block in range(blocks) for n in range(width)]
    return (blocks, width, step) if list(columns) == regular and step > 0 else None


def _view_columns(rows: Tensor, columns: Sequence[int]) -> list[Tensor]:
    """Return views [..., blocks, width] of columns of [..., tensors], in their order."""
    blocks = find_blocks(tuple(columns))
    if blocks is None:
        return [rows[..., c : c + 1].unsqueeze(-2) for c in columns]
    count, width, step = blocks
    sizes, strides = (*rows.shape[:-1], count, width), (*rows.stride()[:-1], step, 1)
    return [rows.as_strided(sizes, strides, rows.storage_offset() + columns[0])]


def _raise_newest(state: Tensor, maxima: Sequence[Tensor], columns: Sequence[int]) -> None:
    """Raise columns of the newest row of a history to maxima, if these are larger or NaN."""
    row = state.data[HISTORY]  # has no version
    views = _view_columns(row, columns)
    values = torch.stack(list(maxima)) if len(maxima) > 1 else maxima[0]
    for view, value in zip(views, values if len(views) > 1 else [values], strict=True):
        torch.maximum(view, value.view(view.shape), out=view)


@mutable_op(
    "fp8_record(Tensor(a!) state, Tensor[] maxima, int[] columns, int model) -> ()",
    lambda *_: None,
)
def fp8_record(state: Tensor, maxima: list[Tensor], columns: list[int], model: int) -> None:
    """Raise elements of the newest row of a history, and mark the model for the end of the pass.

    Args:
        state: [3 + length, tensors].
        maxima: one element each.
        columns: of the maxima, each once.
        model: number of the owner.
    """
    _raise_newest(state, maxima, columns)
    _marks.models.add(model)


@light_op(
    "fp8_read_scales(Tensor state, int[] columns) -> Tensor",
    lambda state, columns: state.new_empty(2, len(columns), SPACE),
)
def fp8_read_scales(state: Tensor, columns: list[int]) -> Tensor:
    """Return the scales of columns and their reciprocals by `space_scales`, of their own.

    Inductor would turn a clone of elements in the graph into a view of the state, which changes.

    Args:
        state: [3 + length, tensors].
        columns: of the tensors.

    Returns:
        [2, columns, 4].
    """
    views = _view_columns(state[: SCALE_INV + 1], columns)
    numbers = views[0] if len(views) == 1 else torch.cat(views, 1)
    return space_scales(numbers.reshape(2, len(columns)))


_SETTINGS = "int margin, bool most_recent, int interval, int length, str group"


@mutable_op(
    "fp8_record_gradients(Tensor(a!) state, Tensor[] maxima, int[] columns, ScalarType dtype,"
    f" int model, {_SETTINGS}) -> ()",
    lambda *_: None,
)
def fp8_record_gradients(
    state: Tensor,
    maxima: list[Tensor],
    columns: list[int],
    dtype: torch.dtype,
    model: int,
    *settings: Any,
) -> None:
    """Record the largest magnitudes of gradients.

    The scales are updated when the running backward ends.

    Args:
        state: [3 + length, layers].
        maxima: one element each.
        columns: numbers of the layers, each once.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2, of the quantized gradients.
        model: number of the owner.
        settings: fields of `Settings`.
    """
    _raise_newest(state, maxima, columns)
    _update_later(model, dtype, Settings(*settings))


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
    return state.new_empty(2, state.shape[1], SPACE)


@mutable_op(
    f"fp8_update(Tensor(a!) state, float largest, int model, {_SETTINGS}) -> Tensor",
    _fake_of_update,
)
def fp8_update(state: Tensor, largest: float, model: int, *settings: Any) -> Tensor:
    """Compute scales from a history, then make room in it for the next pass.

    Returns the scales and their reciprocals by `space_scales`, of their own. Inductor would
    turn a clone of these rows in the graph into a view of the state.

    Args:
        state: [3 + length, tensors].
        largest: the largest finite number of the FP8 dtype.
        model: number of the owner whose pass ends, -1 for a state of gradients.
        settings: fields of `Settings`.
    """
    _marks.models.discard(model)
    state, fields = state.data, Settings(*settings)
    if fields.group:
        compat.reduce_largest(state[HISTORY], fields.group)
    kernel = KERNELS.get(state.device.type)
    scales = None if kernel is None else kernel(state, largest, fields)
    return update_by_torch(state, largest, fields) if scales is None else scales


def update_by_torch(state: Tensor, largest: float, settings: Settings) -> Tensor:
    """Return `fp8_update` of maxima that are reduced already, by ops of torch.

    Args:
        state: [3 + length, tensors], written.
        largest: the largest finite number of the FP8 dtype.
        settings: of the update.
    """
    history = state[HISTORY:]
    amax = history[0] if settings.most_recent else history.amax(0)
    # A number divided by a tensor would be multiplied by its reciprocal: rounded twice.
    scale = torch.tensor(largest * 2.0**-settings.margin, dtype=torch.float32) / amax
    limits = torch.finfo(torch.float32)
    # Not of an infinite amax, of NaN or zero, nor of one that makes the reciprocal infinite.
    valid = (scale >= limits.tiny) & (amax > 0)
    if settings.interval > 1:
        valid &= state[COUNT] == 0
        state[COUNT] = (state[COUNT] + 1) % settings.interval
    scale = scale.clamp(max=limits.max)  # of an amax so small that it overflows
    scale = torch.where(valid, scale, state[SCALE])
    torch.stack([scale, scale.reciprocal()], out=state[: SCALE_INV + 1])
    rolled = history.roll(-1, 0)
    rolled[0] = 0
    history.copy_(rolled)
    return space_scales(state)

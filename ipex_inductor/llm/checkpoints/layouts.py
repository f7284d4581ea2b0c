"""Layouts of quantized layers: names, shapes and dtypes of their tensors, and how they are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ipex_inductor.errors import CheckpointError
from ipex_inductor.llm.checkpoints.column_parts import (
    check_groups,
    dequantize_columns,
    select_groups,
)
from ipex_inductor.llm.checkpoints.settings import BITS, CheckpointSettings
from ipex_inductor.llm.checkpoints.tensors import TensorEntry
from ipex_inductor.ops.quant.weight_only import FLOATS, INTEGERS, NIBBLES, STORED
from ipex_inductor.quantization.weight_only.storage import QuantizedWeight, count_groups
from ipex_inductor.quantization.weight_only.words import (
    WORD,
    as_octets,
    build_weight,
    order_of_groups,
    read_awq,
    read_gptq,
    split_words,
)

Shape = tuple[int, ...]
Spec = Mapping[str, tuple[tuple[Shape, ...], tuple[torch.dtype, ...]]]  # by the tensor's name
INTS = (torch.int32,)
INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: N rows, K columns, G groups of so many columns, bits of a weight.

    `whole_groups` is the number of groups of the whole layer, for a part of its columns; 0 if the
    layer is whole.
    """

    rows: int
    columns: int
    group_size: int
    bits: int
    whole_groups: int = 0

    @property
    def groups(self) -> int:
        """Return the number of groups of a row."""
        if self.whole_groups:
            return self.whole_groups
        return 1 if self.group_size == -1 else count_groups(self.columns, self.group_size)

    def words(self, count: int) -> int:
        """Return how many words so many integers need."""
        return -(-count * self.bits // WORD)


@dataclass(frozen=True)
class Layout:
    """A layout of quantized layers.

    `marker` is the name of the tensor by which a layer is recognised, and `is_marked` whether one
    is that of a quantized layer. `expect` returns shapes and dtypes; tensors in `optional` may be
    missing. `axis` is the dimension of the marker that words fill, -1 without words, and `is_k`
    whether this is K. `read` returns the weight.
    """

    marker: str
    expect: Callable[[Sizes, CheckpointSettings], Spec]
    read: Callable[[Mapping[str, Tensor], Sizes, CheckpointSettings], QuantizedWeight]
    optional: frozenset[str] = frozenset()
    is_marked: Callable[[TensorEntry], bool] = lambda entry: not entry.dtype.is_floating_point
    axis: int = -1
    is_k: bool = True
    groups: str = "g_idx"


def _expect_gptq(sizes: Sizes, settings: CheckpointSettings) -> Spec:
    rows, columns, groups = sizes.rows, sizes.columns, sizes.groups
    return {
        "qweight": (((sizes.words(columns), rows),), INTS),
        "scales": (((groups, rows),), FLOATS),
        "qzeros": (((groups, sizes.words(rows)),), INTS),
        "g_idx": (((columns,),), INDICES),
    }


def _read_gptq(
    tensors: Mapping[str, Tensor], sizes: Sizes, settings: CheckpointSettings
) -> QuantizedWeight:
    return read_gptq(
        tensors["qweight"],
        tensors["scales"],
        tensors.get("qzeros"),
        tensors.get("g_idx"),
        sizes.bits,
        sizes.group_size,
        offset=gptq_offset(settings),
    )


def gptq_offset(settings: CheckpointSettings) -> int:
    """Return what is added to stored zero points: 1 in version 1 of GPTQ's format."""
    return 0 if settings.layout == "gptq_v2" else 1


def _expect_awq(sizes: Sizes, settings: CheckpointSettings) -> Spec:
    rows, columns, groups = sizes.rows, sizes.columns, sizes.groups
    return {
        "qweight": (((columns, sizes.words(rows)),), INTS),
        "scales": (((groups, rows),), FLOATS),
        "qzeros": (((groups, sizes.words(rows)),), INTS),
    }


def _read_awq(
    tensors: Mapping[str, Tensor], sizes: Sizes, settings: CheckpointSettings
) -> QuantizedWeight:
    parts = (tensors["qweight"], tensors["scales"], tensors.get("qzeros"))
    return read_awq(*parts, bits=sizes.bits, group_size=sizes.group_size)


def _expect_int8(sizes: Sizes, settings: CheckpointSettings) -> Spec:
    rows, columns = sizes.rows, sizes.columns
    groups = (rows, sizes.groups)
    scales: tuple[Shape, ...] = (groups, (rows,)) if sizes.groups == 1 else (groups,)
    return {
        "weight": (((rows, columns),), (torch.int8,)),
        "weight_scale": (scales, FLOATS),
        "weight_zero_point": (scales, (torch.int8,)),
    }


def _read_int8(
    tensors: Mapping[str, Tensor], sizes: Sizes, settings: CheckpointSettings
) -> QuantizedWeight:
    scales, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
    has_zeros = zeros is not None and bool(zeros.any())
    return QuantizedWeight(
        weight=tensors["weight"],
        scales=scales.reshape(sizes.rows, -1),
        zeros=zeros.reshape(sizes.rows, -1) if zeros is not None and has_zeros else None,
        order=None,
        weight_dtype="int8",
        group_size=sizes.columns if sizes.group_size == -1 else sizes.group_size,
        in_features=sizes.columns,
    )


def _expect_packed(sizes: Sizes, settings: CheckpointSettings) -> Spec:
    rows, columns, groups = sizes.rows, sizes.columns, sizes.groups
    scales: tuple[Shape, ...] = ((rows, groups), (rows,)) if groups == 1 else ((rows, groups),)
    return {
        "weight_packed": (((rows, sizes.words(columns)),), INTS),
        "weight_scale": (scales, FLOATS),
        "weight_zero_point": (((sizes.words(rows), groups),), INTS),
        "weight_g_idx": (((columns,),), INDICES),
        "weight_shape": (((2,),), INDICES),
    }


def _read_packed(
    tensors: Mapping[str, Tensor], sizes: Sizes, settings: CheckpointSettings
) -> QuantizedWeight:
    stored_zeros = tensors.get("weight_zero_point")
    zeros = None
    if stored_zeros is not None:
        zeros = split_words(stored_zeros.t(), sizes.bits)[:, : sizes.rows].t().int()
    width = -(-sizes.columns * sizes.bits // 8)
    return build_weight(
        as_octets(tensors["weight_packed"])[:, :width],
        tensors["weight_scale"].reshape(sizes.rows, -1),
        zeros,
        tensors.get("weight_g_idx"),
        sizes.bits,
        sizes.group_size,
        sizes.columns,
    )


def _expect_fp8(sizes: Sizes, settings: CheckpointSettings) -> Spec:
    down, across = settings.block
    blocks = (-(-sizes.rows // down), -(-sizes.columns // across))
    return {
        "weight": (((sizes.rows, sizes.columns),), (torch.float8_e4m3fn,)),
        "weight_scale_inv": ((blocks,), FLOATS),
    }


def _read_fp8(
    tensors: Mapping[str, Tensor], sizes: Sizes, settings: CheckpointSettings
) -> QuantizedWeight:
    scales = tensors["weight_scale_inv"].repeat_interleave(settings.block[0], 0)
    return QuantizedWeight(
        weight=tensors["weight"],
        scales=scales[: sizes.rows].contiguous(),
        zeros=None,
        order=None,
        weight_dtype="fp8",
        group_size=min(settings.block[1], sizes.columns),
        in_features=sizes.columns,
    )


def _expect_native(sizes: Sizes, settings: CheckpointSettings) -> Spec:
    rows, name = sizes.rows, settings.weight_dtype
    width = -(-sizes.columns // 2) if name in NIBBLES else sizes.columns
    stored = torch.uint8 if name == "fp8" else STORED[name]
    return {
        "quantized_weight": (((rows, width),), (stored,)),
        "scales": (((rows, sizes.groups),), FLOATS),
        "zeros": (((rows, sizes.groups),), (INTEGERS.get(name, torch.uint8),)),
        "order": (((sizes.columns,),), INTS),
    }


def _read_native(
    tensors: Mapping[str, Tensor], sizes: Sizes, settings: CheckpointSettings
) -> QuantizedWeight:
    name, order = settings.weight_dtype, tensors.get("order")
    if order is not None and not torch.equal(
        order.sort().values, torch.arange(sizes.columns).int()
    ):
        advice = "Copy the checkpoint again."
        raise CheckpointError("an order with each column once", "another one", advice)
    return QuantizedWeight(
        weight=tensors["quantized_weight"].view(STORED[name]),
        scales=tensors["scales"],
        zeros=tensors.get("zeros"),
        order=order,
        weight_dtype=name,
        group_size=sizes.columns if sizes.group_size == -1 else sizes.group_size,
        in_features=sizes.columns,
    )


_GPTQ = Layout("qweight", _expect_gptq, _read_gptq, frozenset({"g_idx", "qzeros"}), axis=0)
LAYOUTS = {
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "awq": Layout("qweight", _expect_awq, _read_awq, frozenset({"qzeros"}), axis=1, is_k=False),
    "int8": Layout("weight", _expect_int8, _read_int8, frozenset({"weight_zero_point"})),
    "compressed_int8": Layout("weight", _expect_int8, _read_int8, frozenset({"weight_zero_point"})),
    "packed": Layout(
        "weight_packed",
        _expect_packed,
        _read_packed,
        frozenset({"weight_zero_point", "weight_g_idx", "weight_shape"}),
        axis=1,
        groups="weight_g_idx",
    ),
    "fp8": Layout(
        "weight",
        _expect_fp8,
        _read_fp8,
        is_marked=lambda entry: entry.dtype is torch.float8_e4m3fn,
    ),
    "ipex": Layout("quantized_weight", _expect_native, _read_native, frozenset({"zeros", "order"})),
}
ZEROS = {"qzeros", "weight_zero_point", "zeros"}


@dataclass(frozen=True)
class LayerPlan:
    """A layer of a checkpoint: its layout, sizes, settings, and tensors by their short names.

    `is_dense` says that its columns are parts of groups, so it is read in floating point.
    """

    layout: Layout
    sizes: Sizes
    settings: CheckpointSettings
    entries: Mapping[str, TensorEntry]
    is_dense: bool = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors in the checkpoint."""
        total = 0
        for entry in self.entries.values():
            count = entry.dtype.itemsize
            for size in entry.shape:
                count *= size
            total += count
        return total

    def read(self) -> QuantizedWeight:
        """Read the tensors and return the weight."""
        tensors, sizes = self._load(), self.sizes
        if sizes.whole_groups:
            tensors = select_groups(tensors, sizes.group_size) or tensors
            sizes = replace(sizes, whole_groups=0)
        return self.layout.read(tensors, sizes, self.settings)

    def read_dense(self) -> Tensor:
        """Read the tensors and return the weight in fp32, [N, K]."""
        offset = gptq_offset(self.settings)
        return dequantize_columns(self._load(), self.sizes.bits, offset)

    def _load(self) -> dict[str, Tensor]:
        return {name: entry.load() for name, entry in self.entries.items()}


def plan_layer(
    name: str,
    rows: int,
    columns: int,
    entries: Mapping[str, TensorEntry],
    settings: CheckpointSettings,
) -> LayerPlan:
    """Return how a layer is read; shapes, dtypes and groups of columns are checked.

    Args:
        name: path of the module, for errors.
        rows: N of the model's layer.
        columns: K of the model's layer.
        entries: tensors of the checkpoint below the name, by their short names.
        settings: of the checkpoint.

    Raises:
        CheckpointError: for tensors that are missing or do not go together.
    """
    layout = LAYOUTS[settings.layout]
    sizes = _sizes_of(name, rows, columns, layout, entries, settings)
    spec = layout.expect(sizes, settings)
    part = {key: entry for key, entry in entries.items() if key in spec}
    for key, (shapes, dtypes) in spec.items():
        entry = part.get(key)
        if entry is None and (key not in layout.optional or (key in ZEROS and not settings.sym)):
            advice = "Copy the checkpoint again: a file may be missing."
            raise CheckpointError(f"{name}.{key} in the checkpoint", "none", advice)
        if entry is not None and (entry.shape not in shapes or entry.dtype not in dtypes):
            raise CheckpointError(
                f"{name}.{key} {list(shapes[0])} in {' or '.join(map(str, dtypes))}, for"
                f" {columns} inputs, {rows} outputs, {sizes.bits} bits, groups of"
                f" {sizes.group_size}",
                f"{list(entry.shape)} in {entry.dtype}",
                "Build the model with the checkpoint's config, and check its quantization config.",
            )
    _check_groups(name, layout, sizes, part)
    _check_zero_points(name, sizes, settings, part)
    is_dense = (
        bool(sizes.whole_groups)
        and select_groups({key: part[key].map() for key in part}, sizes.group_size) is None
    )
    return LayerPlan(layout, sizes, settings, part, is_dense)


def _sizes_of(
    name: str,
    rows: int,
    columns: int,
    layout: Layout,
    entries: Mapping[str, TensorEntry],
    settings: CheckpointSettings,
) -> Sizes:
    """Return the sizes of a layer; in mixed checkpoints its shapes tell bits and groups.

    Args:
        name: path of the module.
        rows: N.
        columns: K.
        layout: of the checkpoint.
        entries: tensors by their short names.
        settings: of the checkpoint.

    Raises:
        CheckpointError: for bits that no reader serves.
    """
    sizes = Sizes(rows, columns, settings.group_size, settings.bits)
    if sizes.group_size >= columns:
        sizes = replace(sizes, group_size=-1)
    if settings.desc_act and layout.groups == "g_idx" and {"g_idx", "scales"} <= entries.keys():
        groups = entries["scales"].shape[0]
        if groups not in (sizes.groups, 1):
            sizes = replace(sizes, whole_groups=groups)
    marker = entries[layout.marker].shape
    if layout.axis < 0 or not settings.mixed or len(marker) != 2:
        return sizes
    count = columns if layout.is_k else rows
    bits = marker[layout.axis] * WORD // max(count, 1)
    if bits not in BITS:
        advice = "Quantize this layer to 4 or 8 bits."
        raise CheckpointError(f"weights of 4 or 8 bits in {name}", f"{bits} bits", advice)
    groups = entries["scales"].shape[0] if "scales" in entries else 1
    return replace(sizes, bits=bits, group_size=_find_group_size(name, sizes, groups))


def _find_group_size(name: str, sizes: Sizes, groups: int) -> int:
    """Return the size of so many groups: that of the settings, a power of two, or equal parts.

    Args:
        name: path of the module.
        sizes: of the settings.
        groups: the number of groups of a row.

    Raises:
        CheckpointError: if none of them has so many groups.
    """
    columns = sizes.columns
    if groups <= 1 or groups == sizes.groups:
        return -1 if groups <= 1 else sizes.group_size
    powers = (1 << bit for bit in range(columns.bit_length()))
    power = next((size for size in powers if count_groups(columns, size) == groups), 0)
    if power or columns % groups == 0:
        return power or columns // groups
    raise CheckpointError(
        f"a number of groups of {name} that tells the size of each in {columns} columns",
        str(groups),
        "Quantize this layer in groups of a power of two.",
    )


def _check_groups(
    name: str, layout: Layout, sizes: Sizes, entries: Mapping[str, TensorEntry]
) -> None:
    """Raise `CheckpointError` if groups of columns have other sizes than the settings say."""
    if layout.groups not in entries:
        return
    if sizes.whole_groups:
        check_groups(name, entries[layout.groups].map(), sizes.whole_groups)
        return
    size = sizes.columns if sizes.group_size == -1 else sizes.group_size
    try:
        order_of_groups(entries[layout.groups].load(), size, sizes.columns)
    except ValueError as error:
        advice = "Check group_size and desc_act of the quantization config."
        raise CheckpointError(f"groups of {size} in {name}", str(error), advice) from error


def _check_zero_points(
    name: str, sizes: Sizes, settings: CheckpointSettings, entries: Mapping[str, TensorEntry]
) -> None:
    """Raise `CheckpointError` for 8-bit zero points that leave a byte when 1 is added to them."""
    if sizes.bits != 8 or settings.layout != "gptq" or "qzeros" not in entries:
        return
    octets = split_words(entries["qzeros"].load(), 8)[:, : sizes.rows]
    if bool((octets == 255).any()):
        advice = "Save the checkpoint with checkpoint_format gptq_v2."
        raise CheckpointError(f"zero points of {name} below 256", "256", advice)

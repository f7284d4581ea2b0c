"""Shards of quantized checkpoints for tensor parallelism: attention by heads, MLPs by grains."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.errors import ArgumentError, CheckpointError
from ipex_inductor.llm.checkpoints.settings import CheckpointSettings, read_settings
from ipex_inductor.quantization.weight_only.words import WORD

Intervals = list[tuple[int, int]]


@dataclass(frozen=True)
class Axes:
    """Dimensions of a stored tensor along N and K, None if it has none, and what an entry spans.

    An entry spans one element, a "word" of packed integers, a "group" of K or a "block" of N.
    """

    n: int | None
    k: int | None
    n_entry: str = "element"
    k_entry: str = "element"


AXES: dict[str, Axes] = {
    "weight": Axes(0, 1),
    "bias": Axes(0, None),
    "qweight": Axes(1, 0, k_entry="word"),
    "scales": Axes(1, 0, k_entry="group"),
    "qzeros": Axes(1, 0, "word", "group"),
    "g_idx": Axes(None, 0),
    "weight_scale": Axes(0, 1, k_entry="group"),
    "weight_zero_point": Axes(0, 1, k_entry="group"),
    "weight_scale_inv": Axes(0, 1, "block", "group"),
    "weight_packed": Axes(0, 1, k_entry="word"),
    "weight_g_idx": Axes(None, 0),
}
# Tensors that a layout stores in another way.
OTHER_AXES: dict[tuple[str, str], Axes] = {
    ("awq", "qweight"): Axes(1, 0, "word"),
    ("packed", "weight_zero_point"): Axes(0, 1, "word", "group"),
}
ORDERS = ("g_idx", "weight_g_idx")
DEFAULT_GRAIN = 64  # elements, without groups
MATRICES = ("qweight", "weight_packed", "weight")


@dataclass(frozen=True)
class Role:
    """Cut of a layer: along N or K, by heads or by grains, in `parts` that are cut alike."""

    along_k: bool = False
    by_heads: bool = False
    parts: str = ""


# By the name of a module.
ROLES: dict[str, Role] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), Role(by_heads=True)),
    "query_key_value": Role(by_heads=True),
    "qkv_proj": Role(by_heads=True, parts="query, key, value"),
    **dict.fromkeys(("o_proj", "out_proj", "dense"), Role(along_k=True, by_heads=True)),
    **dict.fromkeys(("gate_proj", "up_proj", "fc_in", "fc1", "w1", "w3", "dense_h_to_4h"), Role()),
    "gate_up_proj": Role(parts="gate, up"),
    **dict.fromkeys(("down_proj", "fc_out", "fc2", "w2", "dense_4h_to_h"), Role(along_k=True)),
    "lm_head": Role(along_k=True),
}


def shard_low_precision_checkpoint(
    low_precision_checkpoint: Mapping[str, Tensor],
    model_config: Any,
    rank: int,
    world_size: int,
    quantization_method: str,
    tp_grain_size: int,
    desc_act: bool,
    bits: int,
) -> dict[str, Tensor]:
    """Return the part of a quantized checkpoint that one process of tensor parallelism holds.

    Layers before attention are cut along N and those behind it along K, by key-value heads, so a
    process has the query heads of its key-value heads. MLPs are cut by grains. Where ranks do not
    divide heads or grains, the first ranks have one more: 4 heads on 3 ranks are 2, 1 and 1.
    Biases of layers cut along N are cut. Other tensors stay whole.

    Args:
        low_precision_checkpoint: the whole state_dict.
        model_config: config of transformers, or its dictionary.
        rank: of the process.
        world_size: number of processes.
        quantization_method: as `quant_method` in the files.
        tp_grain_size: elements of a grain of an MLP, usually those of a quantization group.
        desc_act: whether columns have groups in another order. Of layers cut along K scales and
            zero points stay whole then, and `g_idx` is cut.
        bits: of a weight.

    Raises:
        ArgumentError: for a rank or a grain that does not exist.
        CheckpointError: for another method, or if a cut would split a head, a word or a group.
    """
    if not 0 <= rank < world_size:
        raise ArgumentError("a rank below world_size", f"{rank} of {world_size}", "Check both.")
    if tp_grain_size <= 0 or tp_grain_size % 8:
        advice = "Pass the group size of the checkpoint, or 64."
        raise ArgumentError("a tp_grain_size that 8 divides", str(tp_grain_size), advice)
    layout = _layout_of(quantization_method, bits)
    heads = Heads.of(model_config)
    shard = Shard(rank, world_size, heads, layout, tp_grain_size, desc_act, bits)
    return shard.cut_state(low_precision_checkpoint)


def shard_state(
    state: Mapping[str, Tensor],
    model_config: Any,
    rank: int,
    world_size: int,
    settings: CheckpointSettings,
) -> dict[str, Tensor]:
    """Return one process's part of a state_dict with these settings; a grain is a group.

    Args:
        state: the whole state_dict.
        model_config: config of the model.
        rank: of the process.
        world_size: number of processes.
        settings: of the checkpoint.

    Raises:
        CheckpointError: if a cut would split a head, a word or a group.
    """
    grain = settings.group_size if settings.group_size > 0 else DEFAULT_GRAIN
    shard = Shard(
        rank,
        world_size,
        Heads.of(model_config),
        settings.layout,
        grain,
        settings.desc_act,
        settings.bits,
    )
    return shard.cut_state(state)


def _layout_of(method: str, bits: int) -> str:
    """Return the layout of a method.

    Raises:
        CheckpointError: for a method that is not served.
    """
    if method == "compressed-tensors":
        return "packed"
    return read_settings({"quant_method": method, "bits": bits}).layout


@dataclass(frozen=True)
class Heads:
    """Numbers of query and key-value heads, and the width of one."""

    queries: int
    keys: int
    width: int

    @classmethod
    def of(cls, config: Any) -> "Heads":
        """Return the heads of a config of transformers, or of its dictionary.

        Raises:
            ArgumentError: if it has none.
        """
        values = config if isinstance(config, Mapping) else config.to_dict()
        values = values.get("text_config", values)
        queries = next((values[n] for n in ("num_attention_heads", "n_head") if n in values), None)
        if queries is None:
            came = f"{', '.join([*values][:5])}"
            raise ArgumentError("a config with num_attention_heads", came, "Pass the model's.")
        keys = values.get("num_key_value_heads") or values.get("num_kv_heads") or queries
        hidden = values.get("hidden_size", values.get("n_embd", 0))
        return cls(queries, keys, values.get("head_dim") or hidden // queries)


@dataclass(frozen=True)
class Shard:
    """One process's part: its rank of so many, and how tensors are stored.

    Args:
        rank: of the process.
        count: number of processes.
        heads: of the model.
        layout: name of the checkpoint's layout.
        grain: elements of a grain.
        act_order: whether columns have groups in another order.
        bits: of a stored integer.
    """

    rank: int
    count: int
    heads: Heads
    layout: str
    grain: int
    act_order: bool
    bits: int

    def cut_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's part of a state_dict.

        Raises:
            CheckpointError: if a cut would split a head, a word or a group.
        """
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            path, _, key = name.rpartition(".")
            layers.setdefault(path, {})[key] = tensor
        return {
            f"{path}.{key}" if path else key: tensor
            for path, tensors in layers.items()
            for key, tensor in self.cut_layer(path, tensors)
        }

    def cut_layer(self, path: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield this process's part of each tensor of the module `path`."""
        role = ROLES.get(path.rpartition(".")[2])
        matrix = next((key for key in MATRICES if key in tensors), None)
        if role is None or matrix is None:
            yield from tensors.items()
            return
        if role.along_k and self.act_order and "weight_g_idx" in tensors:
            came = f"{path} with groups in another order"
            advice = "Quantize without actorder, or save the checkpoint in GPTQ's format."
            raise CheckpointError("columns in order where K is cut", came, advice)
        rows, columns = self._sizes(matrix, tensors)
        size = columns if role.along_k else rows
        intervals = self._intervals(path, role, size)
        for key, tensor in tensors.items():
            if key in ORDERS and not self.act_order:
                _check_order(f"{path}.{key}", tensor)
                continue
            if key == "weight_shape":
                cut = sum(last - first for first, last in intervals)
                yield key, torch.tensor([rows, cut] if role.along_k else [cut, columns])
                continue
            axes = OTHER_AXES.get((self.layout, key), AXES.get(key))
            axis = None if axes is None else axes.k if role.along_k else axes.n
            if axes is None or axis is None:
                yield key, tensor
                continue
            entry = axes.k_entry if role.along_k else axes.n_entry
            yield key, self._take(f"{path}.{key}", tensor, axis, entry, size, intervals)

    def _sizes(self, matrix: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return N and K of a layer."""
        axes = OTHER_AXES.get((self.layout, matrix), AXES[matrix])
        shape, spans = tensors[matrix].shape, {"element": 1, "word": WORD // self.bits}
        assert axes.n is not None
        assert axes.k is not None
        rows, columns = shape[axes.n] * spans[axes.n_entry], shape[axes.k] * spans[axes.k_entry]
        return rows, columns

    def _intervals(self, path: str, role: Role, size: int) -> Intervals:
        """Return the elements of this process along the axis that is cut.

        Raises:
            CheckpointError: if heads or grains do not divide the axis.
        """
        keys = self.heads.keys * self.heads.width
        if role.parts == "gate, up":
            widths = [size // 2, size // 2]
        elif role.parts:
            widths = [size - 2 * keys, keys, keys]
        else:
            widths = [size]
        first, intervals = 0, []
        for width in widths:
            units = self.heads.keys if role.by_heads else width // self.grain
            is_even = width % units == 0 if role.by_heads else width % self.grain == 0
            if units < self.count or not is_even:
                kind = "key-value heads" if role.by_heads else f"grains of {self.grain}"
                raise CheckpointError(
                    f"{self.count} or more {kind} that divide {width} elements of {path}",
                    f"{units} of them",
                    "Use fewer processes, or another tp_grain_size.",
                )
            start, stop = (first + bound * (width // units) for bound in self._bounds(units))
            intervals.append((start, stop))
            first += width
        return intervals

    def _bounds(self, units: int) -> tuple[int, int]:
        """Return the first unit of this process and the one behind its last."""
        each, more = divmod(units, self.count)
        first = self.rank * each + min(self.rank, more)
        return first, first + each + (self.rank < more)

    def _take(
        self, name: str, tensor: Tensor, axis: int, entry: str, size: int, intervals: Intervals
    ) -> Tensor:
        """Return the entries of `tensor` that intervals of elements span.

        Args:
            name: of the tensor, for errors.
            tensor: the whole one.
            axis: the dimension that is cut.
            entry: what an entry spans.
            size: elements of the whole axis.
            intervals: of elements.

        Raises:
            CheckpointError: if a boundary is inside of an entry.
        """
        count = tensor.shape[axis]
        if entry == "group" and (self.act_order or count == 1):
            return tensor
        span = {"element": 1, "word": WORD // self.bits}.get(entry) or self._span(size, count)
        if any(bound % span for pair in intervals for bound in pair if bound != size):
            raise CheckpointError(
                f"boundaries of {name} at multiples of {span} elements ({entry})",
                f"{intervals}",
                "Use another number of processes, or smaller quantization groups.",
            )
        parts = [tensor.narrow(axis, a // span, -(-b // span) - a // span) for a, b in intervals]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, axis)

    def _span(self, size: int, count: int) -> int:
        """Return the elements of each of `count` groups; the last may be shorter."""
        return self.grain if -(-size // self.grain) == count else -(-size // count)


def _check_order(name: str, g_idx: Tensor) -> None:
    """Raise `CheckpointError` for columns with groups in another order than theirs."""
    if bool((g_idx[1:] < g_idx[:-1]).any()):
        came = f"{name} in another order"
        raise CheckpointError("columns in the order of their groups", came, "Pass desc_act=True.")

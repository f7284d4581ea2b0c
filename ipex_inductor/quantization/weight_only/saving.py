"""Checkpoints of quantized models in GPTQ's format (version 2), which other programs read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.weight_only import SYMMETRIC
from ipex_inductor.quantization.files.tensor_file import write_tensors
from ipex_inductor.quantization.weight_only.linear import WeightOnlyLinear, read_weight
from ipex_inductor.quantization.weight_only.qconfig import QConfigWoq
from ipex_inductor.quantization.weight_only.storage import unpack_nibbles
from ipex_inductor.quantization.weight_only.words import join_words

BITS = {"int4": 4, "int8": 8}
WEIGHTS, SETTINGS = "model.safetensors", "quantize_config.json"
ADVICE = "Leave it in floating point (skip), or save the state_dict of the model."


def save_gptq(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a quantized model as a checkpoint: model.safetensors and quantize_config.json.

    Scales keep their dtype. Tensors that several modules share are written once, for the first.
    A model of transformers writes its config.json too.

    Args:
        model: of `quantize_weights` or `gptq`, with INT4 or INT8 weights.
        folder: the folder to write to.

    Raises:
        QuantizationError: for a model that the format cannot hold.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, WeightOnlyLinear)}
    if not layers:
        advice = "Call quantize_weights or gptq first."
        raise QuantizationError("a model with quantized weights", "none of them", advice)
    kinds = {(layer.weight_dtype, _group_size(layer)) for layer in layers.values()}
    types = {kind for kind, _ in kinds}
    if len(types) > 1 or not types <= BITS.keys():
        came = ", ".join(sorted(types))
        raise QuantizationError("weights of one type, int4 or int8", came, ADVICE)
    sizes = {size for _, size in kinds if size != -1}
    if len(sizes) > 1 or (sizes and len(kinds) > 1):
        raise QuantizationError("one group size", f"{sorted(kinds)}", ADVICE)
    tensors: dict[str, Tensor] = {}
    written: set[int] = set()
    inside = tuple(f"{name}." for name in layers)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not name.startswith(inside) and id(tensor) not in written:
            written.add(id(tensor))
            tensors[name] = tensor
    for name, layer in layers.items():
        _check_words(name, layer.in_features, layer.out_features, BITS[layer.weight_dtype])
        _check_zero_points(name, layer)
        tensors.update({f"{name}.{key}": value for key, value in to_gptq(layer).items()})
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / WEIGHTS, tensors)
    settings = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": BITS[types.pop()],
        "group_size": sizes.pop() if sizes else -1,
        "desc_act": any(layer.order is not None for layer in layers.values()),
        "sym": all(layer.zeros is None for layer in layers.values()),
    }
    (target / SETTINGS).write_text(json.dumps(settings, indent=2))
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(target)


def to_gptq(layer: WeightOnlyLinear) -> dict[str, Tensor]:
    """Return the tensors of a layer in GPTQ's layout, version 2, by their names there."""
    bits, columns = BITS[layer.weight_dtype], layer.in_features
    if bits == 8:
        values = layer.quantized_weight.view(torch.uint8) ^ 128
    else:
        values = unpack_nibbles(layer.quantized_weight, columns)
    groups = torch.arange(columns, device=values.device) // layer.group_size
    if layer.order is not None:
        order = layer.order.long()
        in_order, sorted_groups = torch.empty_like(values), groups
        in_order[:, order] = values
        values, groups = in_order, torch.empty_like(groups)
        groups[order] = sorted_groups
    zeros = layer.zeros
    middle = SYMMETRIC[layer.weight_dtype]
    points = torch.full_like(layer.scales, middle).int() if zeros is None else zeros.int()
    if bits == 8:
        points = points + 128
    tensors = {
        "qweight": join_words(values, bits).t().contiguous(),
        "qzeros": join_words(points.t(), bits),
        "scales": layer.scales.t().contiguous(),
        "g_idx": groups.to(torch.int32),
    }
    return tensors if layer.bias is None else {**tensors, "bias": layer.bias}


def check_sizes(layers: Mapping[str, Any], qconfig: QConfigWoq) -> None:
    """Raise `QuantizationError` if layers that are to be quantized cannot be saved.

    Args:
        layers: linear layers by their names.
        qconfig: settings.
    """
    if qconfig.storage not in BITS:
        raise QuantizationError(
            "weights in INT4 or INT8 to save", qconfig.weight_dtype.name, ADVICE
        )
    for name, layer in layers.items():
        rows, columns = read_weight(layer).shape
        _check_words(name, columns, rows, BITS[qconfig.storage])


def _check_words(name: str, columns: int, rows: int, bits: int) -> None:
    if columns * bits % 32 or rows * bits % 32:
        raise QuantizationError(
            f"inputs and outputs of {name} to be multiples of {32 // bits}, which share a word",
            f"{columns} inputs and {rows} outputs",
            ADVICE,
        )


def _check_zero_points(name: str, layer: WeightOnlyLinear) -> None:
    """Raise `QuantizationError` for the zero point 16 of INT4, which version 1 of GPTQ may have."""
    if layer.weight_dtype == "int4" and layer.zeros is not None and bool((layer.zeros > 15).any()):
        raise QuantizationError(
            f"zero points of {name} that fit in 4 bits, 0 to 15",
            "16, out of a checkpoint in version 1 of the format",
            "Keep that checkpoint, or save the state_dict of the model.",
        )


def _group_size(layer: WeightOnlyLinear) -> int:
    """Return the group size of a layer, -1 if it is the whole row."""
    return -1 if layer.group_size >= layer.in_features else layer.group_size

"""Checkpoints of quantized models: in GPTQ's format (version 2) for other programs, and our own."""

import json
import os
from collections.abc import Callable, Mapping
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
from ipex_inductor.quantization.weight_only.words import WORD, join_words

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
    layers = _find_layers(model)
    weight_dtype, group_size = _common_settings(layers)
    if weight_dtype not in BITS:
        raise QuantizationError("weights of type int4 or int8", weight_dtype, ADVICE)
    bits = BITS[weight_dtype]
    for name, layer in layers.items():
        _check_words(name, layer.in_features, layer.out_features, bits)
        _check_zero_points(name, layer)
    settings = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": bits,
        "group_size": group_size,
        "desc_act": any(layer.order is not None for layer in layers.values()),
        "sym": all(layer.zeros is None for layer in layers.values()),
    }
    _write(model, folder, layers, to_gptq, settings)


def save_native(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a quantized model as a checkpoint in the layout of its own layers, for any weights.

    Files are those of `save_gptq`. `load_quantized` reads them; other programs do not.

    Args:
        model: of `quantize_weights` or `gptq`.
        folder: the folder to write to.

    Raises:
        QuantizationError: for a model whose layers differ in type or group size.
    """
    layers = _find_layers(model)
    weight_dtype, group_size = _common_settings(layers)
    settings = {
        "quant_method": "ipex",
        "weight_dtype": weight_dtype,
        "group_size": group_size,
        "sym": all(layer.zeros is None for layer in layers.values()),
    }
    _write(model, folder, layers, to_native, settings)


def fits_gptq(model: nn.Module) -> bool:
    """Return whether `save_gptq` can write a quantized model."""
    layers = _find_layers(model).values()
    return all(
        layer.weight_dtype in BITS
        and not layer.in_features * BITS[layer.weight_dtype] % WORD
        and not layer.out_features * BITS[layer.weight_dtype] % WORD
        for layer in layers
    )


def _find_layers(model: nn.Module) -> dict[str, WeightOnlyLinear]:
    """Return the layers on quantized weights by their paths.

    Raises:
        QuantizationError: if there are none.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, WeightOnlyLinear)}
    if not layers:
        advice = "Call quantize_weights or gptq first."
        raise QuantizationError("a model with quantized weights", "none of them", advice)
    return layers


def _common_settings(layers: Mapping[str, WeightOnlyLinear]) -> tuple[str, int]:
    """Return the type and the group size of all layers, -1 for whole rows.

    Raises:
        QuantizationError: if they differ.
    """
    kinds = {(layer.weight_dtype, _group_size(layer)) for layer in layers.values()}
    types = {kind for kind, _ in kinds}
    if len(types) > 1:
        raise QuantizationError("weights of one type", ", ".join(sorted(types)), ADVICE)
    sizes = {size for _, size in kinds if size != -1}
    if len(sizes) > 1 or (sizes and len(kinds) > 1):
        raise QuantizationError("one group size", f"{sorted(kinds)}", ADVICE)
    return types.pop(), sizes.pop() if sizes else -1


def _write(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layers: Mapping[str, WeightOnlyLinear],
    convert: Callable[[WeightOnlyLinear], dict[str, Tensor]],
    settings: Mapping[str, Any],
) -> None:
    """Write the files of a checkpoint.

    Args:
        model: the model.
        folder: the folder, made if it is not there.
        layers: its layers on quantized weights.
        convert: returns the tensors of a layer.
        settings: text of quantize_config.json.
    """
    tensors: dict[str, Tensor] = {}
    written: set[int] = set()
    inside = tuple(f"{name}." for name in layers)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not name.startswith(inside) and id(tensor) not in written:
            written.add(id(tensor))
            tensors[name] = tensor
    for name, layer in layers.items():
        tensors.update({f"{name}.{key}": value for key, value in convert(layer).items()})
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / WEIGHTS, tensors)
    (target / SETTINGS).write_text(json.dumps(settings, indent=2))
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(target)


def to_native(layer: WeightOnlyLinear) -> dict[str, Tensor]:
    """Return the tensors of a layer as they are; FP8 as the bytes that it is stored in."""
    parts = layer.quantized
    weight = parts.weight.view(torch.uint8) if parts.weight_dtype == "fp8" else parts.weight
    tensors = {
        "quantized_weight": weight,
        "scales": parts.scales,
        "zeros": parts.zeros,
        "order": parts.order,
        "bias": layer.bias,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


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

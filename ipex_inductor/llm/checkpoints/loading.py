"""Load quantized checkpoints into models, layer by layer."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ipex_inductor.errors import ArgumentError, CheckpointError
from ipex_inductor.llm.checkpoints.layouts import LAYOUTS, LayerPlan, plan_layer
from ipex_inductor.llm.checkpoints.settings import (
    CheckpointSettings,
    find_settings,
    read_model_config,
    read_settings,
)
from ipex_inductor.llm.checkpoints.sharding import shard_state
from ipex_inductor.llm.checkpoints.tensors import TensorEntry, open_state, open_tensors
from ipex_inductor.quantization.weight_only.linear import WeightOnlyLinear, is_conv1d
from ipex_inductor.quantization.weight_only.models import (
    REPORT,
    WeightOnlyDecision,
    WeightOnlyReport,
    carry_hooks,
    is_linear,
    set_module,
    untie,
    why_not,
)
from ipex_inductor.quantization.weight_only.qconfig import COMPUTE, WoqLowpMode
from ipex_inductor.reporting.decisions import warn_once

# Tensors that old versions of transformers saved and that models compute.
COMPUTED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.masked_bias")
SHOWN = 5  # names that an error lists


def load_low_precision_checkpoint(
    pathname: str | os.PathLike[str], rank: int = 0, world_size: int = 1
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a quantized checkpoint, and how they are quantized.

    Tensors are views of the files: pages are read when they are used.

    Args:
        pathname: a folder with safetensors or files of torch.save and config.json,
            quant_config.json or quantize_config.json.
        rank: of this process.
        world_size: number of processes. With several, each gets its part, by
            `shard_low_precision_checkpoint`, copied into memory of its own.

    Returns:
        The state_dict, and the settings with `quant_method`, `bits`, `group_size` and `desc_act`.

    Raises:
        CheckpointError: for a missing, torn or foreign file, or a method that is not served.
        ArgumentError: for a rank that does not exist.
    """
    if not 0 <= rank < world_size:
        advice = "Pass 0 and 1 in a single process."
        raise ArgumentError("a rank below world_size", f"{rank} of {world_size}", advice)
    raw = find_settings(pathname)
    settings = read_settings(raw)
    state = {name: entry.map() for name, entry in open_tensors(pathname).items()}
    if world_size > 1:
        state = shard_state(state, read_model_config(pathname), rank, world_size, settings)
    config = {
        **raw,
        "bits": settings.bits,
        "group_size": settings.group_size,
        "desc_act": settings.desc_act,
        "sym": settings.sym,
    }
    return state, config


@torch.no_grad()
def load_quantized(
    model: nn.Module, source: Any, lowp_mode: WoqLowpMode = WoqLowpMode.NONE
) -> nn.Module:
    """Load a quantized checkpoint into a model, which is changed and returned.

    Linear layers that are quantized in the checkpoint are replaced one after the other, so memory
    holds the model and one layer's tensors beside it. Other tensors are cast to the dtype of the
    model's parameters. Everything is checked first: after an error the model is as it was.

    A model on the device "meta" takes no memory before: build it under `torch.device("meta")`.

    Args:
        model: a model of the checkpoint's config, on the device meta or with any weights.
        source: the folder, or the pair that `load_low_precision_checkpoint` returns.
        lowp_mode: precision of the GEMMs.

    Raises:
        CheckpointError: for files that are torn, foreign, or of another model.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("a torch.nn.Module", repr(model), "Pass a model.")
    entries, settings = _open(source)
    plan = _plan_model(model, entries, settings)
    compute = COMPUTE[WoqLowpMode(lowp_mode)]
    fill_buffers(model, plan.computed)
    for name in [*plan.layers]:
        _replace(model, name, plan.layers.pop(name), plan.biases.get(name), compute)
    for names, entry in plan.others:
        _assign(model, names, entry)
    decisions = [
        plan.decisions[name] for name, _ in model.named_modules() if name in plan.decisions
    ]
    vars(model)[REPORT] = WeightOnlyReport(tuple(decisions))
    return model


@dataclass(frozen=True)
class ModelPlan:
    """Targets of a checkpoint's tensors: quantized layers, their biases, other tensors by name."""

    layers: dict[str, LayerPlan]
    biases: dict[str, TensorEntry]
    others: list[tuple[list[str], TensorEntry]]
    computed: list[str]
    decisions: dict[str, WeightOnlyDecision]


def _open(source: Any) -> tuple[dict[str, TensorEntry], CheckpointSettings]:
    """Return the tensors of a source and its settings.

    Raises:
        CheckpointError: for a source that cannot be read.
    """
    if isinstance(source, (str, os.PathLike)):
        settings = read_settings(find_settings(source))
        return open_tensors(source), settings
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        return open_state(source[0]), read_settings(source[1])
    entries = open_state(source)
    warn_once("a state_dict without its quantization config is read as 4-bit GPTQ")
    return entries, CheckpointSettings("gptq", mixed=True, sym=True)


def _plan_model(
    model: nn.Module, entries: Mapping[str, TensorEntry], settings: CheckpointSettings
) -> ModelPlan:
    """Return the plan of a model; names, shapes and dtypes of all tensors are checked.

    Raises:
        CheckpointError: if the checkpoint is not one of this model.
    """
    layers, biases, decisions = {}, {}, {}
    below: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        path, _, key = name.rpartition(".")
        below.setdefault(path, {})[key] = entry
    marker, is_marked = LAYOUTS[settings.layout].marker, LAYOUTS[settings.layout].is_marked
    seen: set[str] = set()
    for name, module in model.named_modules():
        part = below.get(name, {})
        if not is_linear(module):
            continue
        if marker not in part or not is_marked(part[marker]):
            size = _size(module)
            reason = "the checkpoint has its weight in floating point"
            decisions[name] = WeightOnlyDecision(name, False, "", reason, size, size)
            continue
        _check_kind(name, module)
        rows, columns = _shape(module)
        layer = plan_layer(name, rows, columns, part, settings)
        layers[name] = layer
        decisions[name] = _decide(name, module, layer, settings.layout)
        seen.update(f"{name}.{key}" for key in layer.entries)
        if "bias" in part:
            _check_tensor(f"{name}.bias", part["bias"], (rows,))
            biases[name] = part["bias"]
            seen.add(f"{name}.bias")
        elif getattr(module, "bias", None) is not None:
            raise _make_missing_error([f"{name}.bias"])
    if not layers:
        raise CheckpointError(
            f"quantized layers ({marker}) of modules of the model",
            f"none below {', '.join([*below][:SHOWN])}",
            "Build the model with the checkpoint's config and class.",
        )
    rest = {name: entry for name, entry in entries.items() if name not in seen}
    others = _plan_others(model, rest, layers)
    return ModelPlan(layers, biases, others, _computed_buffers(model), decisions)


def _decide(name: str, module: nn.Module, layer: LayerPlan, layout: str) -> WeightOnlyDecision:
    size = _size(module)
    if layer.is_dense:
        reason = "its columns are parts of groups: it is dequantized"
        return WeightOnlyDecision(name, False, "", reason, size, size)
    return WeightOnlyDecision(name, True, layout, "", size, layer.nbytes)


def _plan_others(
    model: nn.Module, entries: Mapping[str, TensorEntry], layers: Mapping[str, LayerPlan]
) -> list[tuple[list[str], TensorEntry]]:
    """Return the tensors beside quantized layers, each with all names that the model has for it.

    Raises:
        CheckpointError: for names that the model or the checkpoint has not, and other shapes.
    """
    inside = tuple(f"{name}." for name in layers)
    tensors = {
        name: tensor
        for name, tensor in _named_tensors(model).items()
        if not name.startswith(inside)
    }
    ids: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        ids.setdefault(id(tensor), []).append(name)
    unknown = [n for n in entries if n not in tensors and not n.endswith(COMPUTED)]
    if unknown:
        raise CheckpointError(
            "names of the model's parameters",
            f"{len(unknown)} others: {', '.join(unknown[:SHOWN])}",
            "Build the model with the checkpoint's config and class.",
        )
    others, absent = [], []
    for names in ids.values():
        entry = next((entries[name] for name in names if name in entries), None)
        if entry is None:
            absent += names
            continue
        _check_tensor(names[0], entry, tuple(tensors[names[0]].shape))
        others.append((names, entry))
    if absent:
        raise _make_missing_error(absent)
    return others


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, and buffers that a state_dict has, with every name of a shared one."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _computed_buffers(model: nn.Module) -> list[str]:
    """Return modules with buffers on the device meta that no state_dict has.

    Raises:
        CheckpointError: if the model has no method of transformers that computes them.
    """
    state = model.state_dict(keep_vars=True).keys()
    names = [n for n, b in model.named_buffers() if b.is_meta and n not in state]
    paths = [*dict.fromkeys(name.rpartition(".")[0] for name in names)]
    for path in paths:
        module = model.get_submodule(path)
        if not hasattr(model, "_init_weights") or any(True for _ in module.parameters(False)):
            raise CheckpointError(
                "buffers with values, as no checkpoint has them",
                f"{', '.join(names[:SHOWN])} on the device meta",
                "Build the model on a real device.",
            )
    return paths


def compute_buffers(model: nn.Module) -> None:
    """Give values to the buffers on the device meta that no checkpoint has, on the CPU.

    Raises:
        CheckpointError: if the model has no method of transformers that computes them.
    """
    fill_buffers(model, _computed_buffers(model))


def fill_buffers(model: Any, paths: list[str]) -> None:
    """Compute the buffers of the modules at these paths by the model's own initialization."""
    for path in paths:
        part = model.get_submodule(path)
        for name, buffer in [*part.named_buffers(recurse=False)]:
            if buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device="cpu")
        model._init_weights(part)


def _replace(
    model: nn.Module,
    name: str,
    layer: LayerPlan,
    bias: TensorEntry | None,
    compute: str,
) -> None:
    """Put a quantized layer in the place of a linear one, whose weight is released before.

    Args:
        model: the model.
        name: path of the layer.
        layer: how it is read.
        bias: of the checkpoint, or None.
        compute: precision of the GEMM.
    """
    linear: Any = model.get_submodule(name)
    weight: Tensor = linear.weight
    device = torch.device("cpu") if weight.is_meta else weight.device
    dtype = weight.dtype
    values = None if bias is None else bias.load().to(device, dtype)
    if layer.is_dense:
        _fill_dense(linear, layer.read_dense().to(device, dtype), values)
        return
    result = WeightOnlyLinear(layer.read(), values, compute).to(device).move_to_huge_pages()
    result.train(linear.training)
    carry_hooks(linear, result)
    set_module(model, name, result)
    untie(model, name)


def _fill_dense(linear: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Give a linear layer the values of its weight and bias."""
    stored = weight.t().contiguous() if is_conv1d(linear) else weight
    linear.weight = nn.Parameter(stored, requires_grad=linear.weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=linear.weight.requires_grad)


def _assign(model: nn.Module, names: list[str], entry: TensorEntry) -> None:
    """Give a tensor its value; one on the device meta is replaced under all of its names."""
    tensors = _named_tensors(model)
    old = tensors[names[0]]
    if not old.is_meta:
        old.data.copy_(entry.load())
        return
    value: Tensor = entry.load().to(old.dtype)
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad)
    for name in names:
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        table: Any = owner._parameters if isinstance(old, nn.Parameter) else owner._buffers
        table[key] = value


def _check_kind(name: str, module: nn.Module) -> None:
    """Raise `CheckpointError` for a layer that cannot be replaced."""
    reason = why_not(module)
    if reason and "meta" not in reason:
        advice = "Load the checkpoint into a model whose layers are plain."
        raise CheckpointError(f"a plain linear layer {name}", reason, advice)


def _check_tensor(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` for another shape."""
    if entry.shape != shape:
        advice = "Build the model with the checkpoint's config."
        raise CheckpointError(f"{name} {list(shape)}", str(list(entry.shape)), advice)


def _make_missing_error(names: list[str]) -> CheckpointError:
    return CheckpointError(
        "all tensors of the model in the checkpoint",
        f"{len(names)} missing: {', '.join(names[:SHOWN])}",
        "Copy the checkpoint again, or build the model with its config.",
    )


def _shape(module: nn.Module) -> tuple[int, int]:
    """Return N and K of a linear layer."""
    weight: Any = module.weight
    first, second = weight.shape
    return (second, first) if is_conv1d(module) else (first, second)


def _size(module: nn.Module) -> int:
    weight: Any = module.weight
    return int(weight.numel() * weight.element_size())

"""A quantized model in two files, for any supported torch: weights, and layers with scales.

The weights are the floating-point parameters in a safetensors file. The JSON file beside it has its
digest, the decisions and scales, and the kinds of the inputs with which the model is captured anew.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError, SummaryFileError
from ipex_inductor.quantization.converted import QuantizedModel
from ipex_inductor.quantization.files.example_inputs import InputEntry, describe_inputs, make_inputs
from ipex_inductor.quantization.files.summary_file import (
    LayerEntry,
    TensorEntry,
    summary_of,
    write_whole,
)
from ipex_inductor.quantization.files.tensor_file import read_tensors, write_tensors
from ipex_inductor.quantization.graphs.copying import copy_with
from ipex_inductor.quantization.model_summary import layer_entries, load_scales
from ipex_inductor.quantization.preparing import (
    ModelRecipe,
    as_tuple,
    finish_conversion,
    prepare_statically,
)
from ipex_inductor.quantization.qconfigs import SmoothQuant
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping
from ipex_inductor.quantization.smoothing import set_factors

SHOWN = 5  # names that an error lists


class SchemeEntry(msgspec.Struct, omit_defaults=True):
    """Settings of a quantized layer beside its scales."""

    symmetric: bool
    per_channel: bool
    bias_correction: bool = False
    dtype: Literal["int8", "float8_e4m3fn"] = "int8"
    weight_only: bool = False


class ModelFile(msgspec.Struct):
    """The JSON file. `digest` is the SHA-256 of the file of weights.

    Version 2 has layers in FP8, which readers of version 1 would load as int8.
    """

    format: Literal["ipex_inductor.quantized_model"]
    version: Literal[1, 2]
    torch: str
    weights: str
    digest: str
    bn_folding: bool
    inputs: InputEntry
    layers: list[LayerEntry]
    schemes: dict[str, SchemeEntry]
    tensors: dict[str, TensorEntry]
    means: dict[str, list[float]] = {}
    smoothing: dict[str, list[float]] | None = None
    shares_factors: bool = True


def save(quantized: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a quantized model to `path` (.safetensors) and a JSON file beside it.

    Raises:
        QuantizationError: for a model that was not quantized statically.
    """
    if not isinstance(quantized, QuantizedModel) or quantized._ipex_recipe is None:
        raise QuantizationError(
            "a statically quantized model",
            f"a {type(quantized).__name__}",
            "A dynamically quantized model has no scales: save its state_dict.",
        )
    weights, description = _files(path)
    recipe: ModelRecipe = quantized._ipex_recipe
    smooth = recipe.smoothing
    digest = write_tensors(weights, quantized.state_dict())
    scales = quantized.tensor_scales()
    content = ModelFile(
        format="ipex_inductor.quantized_model",
        version=2 if any(scheme.is_fp8 for scheme in recipe.schemes.values()) else 1,
        torch=str(compat.VERSION),  # written for readers; nothing depends on it
        weights=weights.name,
        digest=digest,
        bn_folding=recipe.bn_folding,
        inputs=describe_inputs(quantized._ipex_example_inputs or ((), {})),
        layers=layer_entries(quantized.layer_decisions),
        schemes={name: _entry(scheme) for name, scheme in recipe.schemes.items()},
        tensors={name: TensorEntry(*scale) for name, scale in scales.items()},
        means=recipe.means,
        smoothing=None if smooth is None else recipe.factors,
        shares_factors=smooth is None or smooth.share,
    )
    write_whole(description, msgspec.json.format(msgspec.json.encode(content), indent=2))


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    example_inputs: Any = None,
    example_kwarg_inputs: Mapping[str, Any] | None = None,
) -> QuantizedModel:
    """Return the quantized model of a file; `model` gives the code, and is not changed.

    Args:
        path: the path that was given to `save`.
        model: a model of the same class and sizes, with any weights.
        example_inputs: needed only for a model with inputs of unusual types.
        example_kwarg_inputs: keyword arguments beside them.

    Raises:
        SummaryFileError: if a file is missing, torn, changed, or of another model.
    """
    weights, description = _files(path)
    content = _read(description)
    tensors = read_tensors(weights.with_name(content.weights), content.digest)
    twin = _fill(model, tensors, str(weights))
    inputs = (as_tuple(example_inputs), dict(example_kwarg_inputs or {}))
    if example_inputs is None and not example_kwarg_inputs:
        inputs = make_inputs(content.inputs, str(description))
    summary = summary_of(
        str(description), content.layers, content.tensors, content.smoothing or {}, content.means
    )
    mapping = SchemeMapping(None, tuple((n, _scheme(s)) for n, s in content.schemes.items()))
    smooth = None if content.smoothing is None else SmoothQuant(share=content.shares_factors)
    prepared = prepare_statically(twin, mapping, smooth, inputs, content.bn_folding)
    load_scales(prepared, summary)
    if content.smoothing is not None:
        set_factors(prepared, summary.file, summary.factors)
    return finish_conversion(prepared)


def _entry(scheme: Scheme) -> SchemeEntry:
    dtype: Literal["int8", "float8_e4m3fn"] = "float8_e4m3fn" if scheme.is_fp8 else "int8"
    return SchemeEntry(
        scheme.symmetric, scheme.per_channel, scheme.bias_correction, dtype, scheme.weight_only
    )


def _scheme(entry: SchemeEntry) -> Scheme:
    return Scheme(
        symmetric=entry.symmetric,
        per_channel=entry.per_channel,
        bias_correction=entry.bias_correction,
        dtype=getattr(torch, entry.dtype),
        weight_only=entry.weight_only,
    )


def _files(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    file = Path(path)
    weights = file if file.suffix == ".safetensors" else file.with_name(f"{file.name}.safetensors")
    return weights, weights.with_suffix(".json")


def _read(file: Path) -> ModelFile:
    if not file.is_file():
        advice = "Both files belong together; move them together."
        raise SummaryFileError("the description of a quantized model", f"no file {file}", advice)
    try:
        return msgspec.json.decode(file.read_bytes(), type=ModelFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SummaryFileError(
            "the description of a quantized model",
            f"{file}, which is torn or foreign ({error})",
            "Copy both files again, or save the model anew.",
        ) from error


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], file: str) -> nn.Module:
    """Return a copy of a model that has the weights of a file.

    Raises:
        SummaryFileError: with a list, if names, shapes or types differ.
    """
    state = model.state_dict(keep_vars=True)
    different = [
        name
        for name in {**state, **tensors}
        if name not in state
        or name not in tensors
        or state[name].shape != tensors[name].shape
        or state[name].dtype != tensors[name].dtype
    ]
    if different:
        listed = ", ".join(different[:SHOWN])
        raise SummaryFileError(
            "the file of a model with these parameters",
            f"{file}, which differs in {len(different)}: {listed}",
            "Build the model as it was built when it was saved.",
        )
    return copy_with(model, {id(state[name]): _like(state[name], tensors[name]) for name in state})


def _like(old: Tensor, value: Tensor) -> Tensor:
    """Return a tensor of a file as a parameter or buffer like `old`."""
    value = value.to(old.device)
    is_parameter = isinstance(old, nn.Parameter)
    return nn.Parameter(value, requires_grad=old.requires_grad) if is_parameter else value

"""`prepare` and `convert`, in the forms of both eras of IPEX."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization import dynamic
from ipex_inductor.quantization.calibration import QuantConf
from ipex_inductor.quantization.converted import QuantizedModel
from ipex_inductor.quantization.model_summary import layer_schemes, means_of
from ipex_inductor.quantization.prepared import PreparedModel, prepare_graph
from ipex_inductor.quantization.qconfigs import SmoothQuant, is_dynamic, read_mapping
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping
from ipex_inductor.quantization.smoothing import (
    convert_smoothed,
    factors_of,
    prepare_smoothed,
    smoothing_of,
)
from ipex_inductor.quantization.weight_only import models as weights
from ipex_inductor.quantization.weight_only.qconfig import is_weight_only


@dataclass(frozen=True)
class ModelRecipe:
    """Settings by which a model was quantized: schemes by layer, factors by tensor."""

    schemes: dict[str, Scheme]
    bn_folding: bool
    smoothing: SmoothQuant | None
    factors: dict[str, list[float]]
    means: dict[str, list[float]]


def prepare(
    model: nn.Module,
    configure: Any,
    example_inputs: Any = None,
    inplace: bool = False,
    bn_folding: bool = True,
    example_kwarg_inputs: dict[str, Any] | None = None,
) -> Any:
    """Prepare a model for calibration, for dynamic or for weight-only quantization.

    `model` itself is never changed; what is returned shares its parameters. Weight-only
    quantization with `inplace` changes the model, so that memory holds its weights once.

    Args:
        model: the model.
        configure: a QConfigMapping or QConfig, ours or of `torch.ao`; or a `QuantConf`.
        example_inputs: a tensor or a tuple, for static quantization. Sizes may differ later.
        inplace: change the model in weight-only quantization; else nothing is copied that could
            be shared, and the argument is accepted.
        bn_folding: fold batch norms into the layers before them.
        example_kwarg_inputs: keyword arguments of the model.

    Returns:
        A prepared model, to be called with calibration data; for a `QuantConf` the pair of model
        and configuration, whose blocks of `calibrate` then observe this model alone.

    Raises:
        QuantizationError: if inputs are missing, or the model cannot be quantized.
    """
    if isinstance(configure, QuantConf):
        configure.bind(model)
        return model, configure
    if is_weight_only(configure):
        return weights.prepare_weights(model, configure, inplace)
    mapping = read_mapping(configure)
    if is_dynamic(mapping):
        return dynamic.prepare_dynamic(model, mapping)
    if example_inputs is None and not example_kwarg_inputs:
        raise QuantizationError(
            "example inputs, as static quantization captures a graph",
            "none",
            "Pass example_inputs=..., or use default_dynamic_qconfig_mapping.",
        )
    args, kwargs = as_tuple(example_inputs), dict(example_kwarg_inputs or {})
    smooth = getattr(configure, "smooth_quant", None)
    return prepare_statically(model, mapping, smooth, (args, kwargs), bn_folding)


def prepare_statically(
    model: nn.Module,
    mapping: SchemeMapping,
    smooth: SmoothQuant | None,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    bn_folding: bool = True,
) -> PreparedModel:
    """Return a captured copy of `model` with observers.

    Args:
        model: the model; it is not changed.
        mapping: which layer gets which scheme.
        smooth: how SmoothQuant's factors are computed, None without them.
        inputs: example inputs, positional and keyword.
        bn_folding: fold batch norms into the layers before them.
    """
    if smooth is not None:
        prepared = prepare_smoothed(model, mapping, smooth, inputs, bn_folding)
    else:
        prepared = prepare_graph(model, mapping, *inputs, bn_folding)
    prepared._ipex_example_inputs = inputs
    prepared._ipex_bn_folding = bn_folding
    return prepared.eval()


def convert(
    model: nn.Module, conf: Any = None, inputs: Any = None, inplace: bool = False
) -> nn.Module:
    """Return the quantized form of a model; `model` itself is never changed.

    Weight-only quantization with `inplace` releases each layer's weight behind it.

    Args:
        model: a prepared model; or with `conf` and `inputs` any model, as in releases 1.9 to 1.11.
        conf: a `QuantConf` with the statistics of `calibrate`, or with a file.
        inputs: example inputs, a tensor or a tuple.
        inplace: change the model in weight-only quantization; else accepted.

    Raises:
        QuantizationError: if the model was not prepared or not calibrated.
        SummaryFileError: if the configuration's file is missing, torn, or of another model.
    """
    if isinstance(conf, QuantConf):
        return _convert_by_conf(model, conf, inputs)
    if isinstance(model, PreparedModel):
        return finish_conversion(model)
    if dynamic.is_prepared(model):
        return dynamic.convert_dynamic(model)
    if weights.is_prepared(model):
        return weights.convert_weights(model, inplace)
    raise QuantizationError(
        "a model that `prepare` returned, or a QuantConf beside the model",
        f"a {type(model).__name__} and conf={conf!r}",
        "Call prepare first, or convert(model, conf, inputs).",
    )


def _convert_by_conf(model: nn.Module, conf: QuantConf, inputs: Any) -> QuantizedModel:
    if inputs is None:
        advice = "Pass a tensor or a tuple: convert(model, conf, inputs)."
        raise QuantizationError("example inputs", "none", advice)
    if isinstance(model, PreparedModel):
        advice = "Pass the model itself, or convert(prepared) without a configuration."
        raise QuantizationError("a model beside a QuantConf", "a prepared model", advice)
    prepared = conf.prepared_for(model, as_tuple(inputs))
    prepared._ipex_example_inputs = as_tuple(inputs), {}
    return finish_conversion(prepared)


def finish_conversion(prepared: PreparedModel) -> QuantizedModel:
    """Return the quantized form of a model, with all that `save` needs.

    That is how it was quantized, its inputs, and the autocast of its conversion.
    """
    quantized = convert_smoothed(prepared).eval()
    smooth, tensors = smoothing_of(prepared)
    quantized._ipex_recipe = ModelRecipe(
        schemes=layer_schemes(prepared),
        bn_folding=prepared._ipex_bn_folding,
        smoothing=smooth if tensors else None,
        factors=factors_of(prepared),
        means=means_of(prepared),
    )
    quantized._ipex_example_inputs = prepared._ipex_example_inputs
    if torch.is_autocast_enabled("cpu"):
        quantized._ipex_autocast_dtype = torch.get_autocast_dtype("cpu")
    return quantized


def as_tuple(inputs: Any) -> tuple[Any, ...]:
    """Return example inputs as a tuple of positional arguments."""
    if inputs is None:
        return ()
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)

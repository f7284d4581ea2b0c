"""Quantize the linear layers of a model in `llm.optimize`, by a qconfig or from a checkpoint."""

import copy
from typing import Any

from torch import nn

from ipex_inductor.errors import ArgumentError
from ipex_inductor.llm.checkpoints import load_quantized
from ipex_inductor.quantization.weight_only import WoqLowpMode, quantize_weights
from ipex_inductor.quantization.weight_only.qconfig import is_weight_only, read_mapping


def quantize(
    model: nn.Module,
    quantization_config: Any = None,
    qconfig_summary_file: str | None = None,
    low_precision_checkpoint: Any = None,
    inplace: bool = False,
) -> nn.Module:
    """Return `model` with quantized linear layers.

    Args:
        model: the model.
        quantization_config: of `get_weight_only_quant_qconfig_mapping`. Beside a checkpoint it sets
            the precision of the GEMMs alone.
        qconfig_summary_file: scales of static INT8, which is refused.
        low_precision_checkpoint: a folder, a state dict of GPTQ, or a pair of a state dict and its
            quantization config.
        inplace: change the model itself.

    Raises:
        ArgumentError: for static INT8.
        CheckpointError: for a checkpoint that is torn, foreign, or of another model.
        QuantizationError: if no layer would be quantized.
    """
    if quantization_config is not None and not is_weight_only(quantization_config):
        _refuse_static(f"quantization_config={type(quantization_config).__name__}")
    if qconfig_summary_file is not None:
        _refuse_static("qconfig_summary_file")
    if low_precision_checkpoint is None:
        return quantize_weights(model, quantization_config, inplace=inplace)
    target = model if inplace else copy.deepcopy(model)
    lowp_mode = WoqLowpMode.NONE
    if quantization_config is not None:
        chosen = read_mapping(quantization_config).choose("", nn.Linear(1, 1, device="meta"))
        lowp_mode = lowp_mode if chosen is None else WoqLowpMode(chosen.lowp_mode)
    return load_quantized(target, low_precision_checkpoint, lowp_mode)


def _refuse_static(given: str) -> None:
    raise ArgumentError(
        "a qconfig of get_weight_only_quant_qconfig_mapping in llm.optimize",
        given,
        "Static INT8 is quantized by ipex_inductor.quantization.prepare and convert.",
    )

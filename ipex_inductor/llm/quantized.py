"""The place where `llm.optimize` quantizes a model, by a qconfig or from a checkpoint."""

from typing import Any

from torch import nn

from ipex_inductor.errors import ArgumentError


def quantize(
    model: nn.Module,
    quantization_config: Any = None,
    low_precision_checkpoint: Any = None,
    qconfig_summary_file: str | None = None,
    sample_inputs: Any = None,
) -> nn.Module:
    """Return `model` with quantized linear layers.

    Args:
        model: the model, which may be changed.
        quantization_config: a `QConfigMapping` or a qconfig.
        low_precision_checkpoint: a state dict, or a pair of one and its quantization config.
        qconfig_summary_file: scales of static INT8, measured before.
        sample_inputs: keyword arguments of `forward`.

    Raises:
        ArgumentError: always: no kind of quantization is available through `llm.optimize`.
    """
    given = {
        "quantization_config": quantization_config,
        "low_precision_checkpoint": low_precision_checkpoint,
        "qconfig_summary_file": qconfig_summary_file,
    }
    raise ArgumentError(
        "llm.optimize without quantization, which is not available in this version",
        ", ".join(name for name, value in given.items() if value is not None),
        "Use ipex_inductor.quantization.prepare and convert for INT8, or dtype=torch.bfloat16.",
    )

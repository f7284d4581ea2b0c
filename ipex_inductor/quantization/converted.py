"""The converted model: a graph of quantize and dequantize nodes."""

import torch

from ipex_inductor.quantization.prepared import PreparedModel


def convert_prepared(prepared: PreparedModel) -> "QuantizedModel":
    """Return the quantized form of a calibrated model."""
    raise NotImplementedError


class QuantizedModel(torch.fx.GraphModule):
    """A captured model with quantize and dequantize nodes."""

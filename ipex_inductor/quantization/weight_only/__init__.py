"""Weight-only quantization: settings, rounding, GPTQ, and the linear layer on quantized weights."""

from ipex_inductor.quantization.weight_only.calibrating import gptq
from ipex_inductor.quantization.weight_only.linear import (
    QuantDtype,
    QuantMethod,
    WeightOnlyLinear,
)
from ipex_inductor.quantization.weight_only.models import (
    WeightOnlyDecision,
    WeightOnlyReport,
    quantize_weights,
    report_weights,
)
from ipex_inductor.quantization.weight_only.qconfig import (
    QConfigWoq,
    WoqActQuantMode,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightQScheme,
)
from ipex_inductor.quantization.weight_only.saving import save_gptq, save_native
from ipex_inductor.quantization.weight_only.storage import QuantizedWeight

__all__ = [
    "QConfigWoq",
    "QuantDtype",
    "QuantMethod",
    "QuantizedWeight",
    "WeightOnlyDecision",
    "WeightOnlyLinear",
    "WeightOnlyReport",
    "WoqActQuantMode",
    "WoqLowpMode",
    "WoqWeightDtype",
    "WoqWeightQScheme",
    "gptq",
    "quantize_weights",
    "report_weights",
    "save_gptq",
    "save_native",
]

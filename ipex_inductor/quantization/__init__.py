"""INT8 quantization: capture, observe, convert to a graph of quantize and dequantize nodes."""

from importlib import import_module
from typing import Any

from ipex_inductor.quantization.calibration import QuantConf, calibrate
from ipex_inductor.quantization.model_file import load, save
from ipex_inductor.quantization.preparing import convert, prepare
from ipex_inductor.quantization.qconfigs import (
    QConfigMapping,
    default_dynamic_qconfig,
    default_dynamic_qconfig_mapping,
    default_static_qconfig,
    default_static_qconfig_mapping,
    get_smooth_quant_qconfig_mapping,
    get_weight_only_quant_qconfig_mapping,
)
from ipex_inductor.quantization.scheme import Scheme
from ipex_inductor.quantization.training import prepare_qat
from ipex_inductor.quantization.tuning import autotune
from ipex_inductor.quantization.weight_only import (
    WeightOnlyLinear,
    gptq,
    quantize_weights,
    report_weights,
    save_gptq,
)
from ipex_inductor.quantization.weight_only.qconfig import (
    QConfigWoq,
    WoqActQuantMode,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightQScheme,
)

__all__ = [
    "QConfigMapping",
    "QConfigWoq",
    "QuantConf",
    "Scheme",
    "WeightOnlyLinear",
    "WoqActQuantMode",
    "WoqLowpMode",
    "WoqWeightDtype",
    "WoqWeightQScheme",
    "autotune",
    "calibrate",
    "convert",
    "default_dynamic_qconfig",
    "default_dynamic_qconfig_mapping",
    "default_static_qconfig",
    "default_static_qconfig_mapping",
    "get_smooth_quant_qconfig_mapping",
    "get_weight_only_quant_qconfig_mapping",
    "gptq",
    "load",
    "prepare",
    "prepare_qat",
    "quantize_weights",
    "report",
    "report_weights",
    "save",
    "save_gptq",
]


def __getattr__(name: str) -> Any:
    if name == "report":  # it compiles, which nothing in this folder does
        return import_module("ipex_inductor.inspection.quantization_report").report_layers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

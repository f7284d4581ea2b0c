"""The layer on quantized weights by the names that IPEX has in `ipex.llm.quantization`."""

from ipex_inductor.quantization.weight_only import QuantDtype, QuantMethod
from ipex_inductor.quantization.weight_only import WeightOnlyLinear as IPEXWeightOnlyQuantizedLinear

__all__ = ["IPEXWeightOnlyQuantizedLinear", "QuantDtype", "QuantMethod"]

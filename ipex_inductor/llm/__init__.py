"""Language models: checkpoints with quantized weights."""

from ipex_inductor.llm import quantization as quantization
from ipex_inductor.llm.checkpoints import load_low_precision_checkpoint, load_quantized

__all__ = ["load_low_precision_checkpoint", "load_quantized", "quantization"]

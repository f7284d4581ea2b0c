"""`ipex.llm`: language models of transformers, optimized in one call, and quantized checkpoints."""

from ipex_inductor.llm import quantization as quantization
from ipex_inductor.llm.checkpoints import load_low_precision_checkpoint, load_quantized
from ipex_inductor.llm.optimizing import optimize as optimize
from ipex_inductor.llm.optimizing import optimize as optimize_transformers

__all__ = [
    "load_low_precision_checkpoint",
    "load_quantized",
    "optimize",
    "optimize_transformers",
    "quantization",
]

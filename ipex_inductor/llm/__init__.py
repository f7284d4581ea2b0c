"""`ipex.llm`: language models of transformers, optimized in one call, and quantized checkpoints."""

from ipex_inductor.llm import quantization as quantization
from ipex_inductor.llm.checkpoints import (
    load_low_precision_checkpoint,
    load_quantized,
    shard_low_precision_checkpoint,
)
from ipex_inductor.llm.optimizing import optimize as optimize
from ipex_inductor.llm.optimizing import optimize as optimize_transformers
from ipex_inductor.llm.parallel import parallelize as parallelize

__all__ = [
    "load_low_precision_checkpoint",
    "load_quantized",
    "optimize",
    "optimize_transformers",
    "parallelize",
    "quantization",
    "shard_low_precision_checkpoint",
]

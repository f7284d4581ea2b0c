"""Checkpoints of quantized language models: GPTQ, AWQ, rtn, int8, FP8, compressed-tensors."""

from ipex_inductor.llm.checkpoints.loading import load_low_precision_checkpoint, load_quantized
from ipex_inductor.llm.checkpoints.sharding import shard_low_precision_checkpoint

__all__ = ["load_low_precision_checkpoint", "load_quantized", "shard_low_precision_checkpoint"]

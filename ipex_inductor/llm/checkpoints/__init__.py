"""Checkpoints of quantized language models: GPTQ, AWQ, rtn, int8, FP8, compressed-tensors."""

from ipex_inductor.llm.checkpoints.loading import load_low_precision_checkpoint, load_quantized

__all__ = ["load_low_precision_checkpoint", "load_quantized"]

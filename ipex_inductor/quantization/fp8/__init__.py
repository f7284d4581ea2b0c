"""FP8 training and inference with delayed scaling, by the API of IPEX and Transformer Engine."""

from ipex_inductor.quantization.fp8.autocast import fp8_autocast
from ipex_inductor.quantization.fp8.linear import FP8Linear
from ipex_inductor.quantization.fp8.preparing import prepare_fp8
from ipex_inductor.quantization.fp8.recipe import DelayedScaling, Format
from ipex_inductor.quantization.fp8.recomputation import checkpoint_contexts

__all__ = [
    "DelayedScaling",
    "FP8Linear",
    "Format",
    "checkpoint_contexts",
    "fp8_autocast",
    "prepare_fp8",
]

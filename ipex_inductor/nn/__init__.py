"""Functions and modules of `ipex.nn`, as torch code."""

from ipex_inductor.nn import functional, modules
from ipex_inductor.nn.frozen_batch_norm import FrozenBatchNorm2d

__all__ = ["FrozenBatchNorm2d", "functional", "modules"]

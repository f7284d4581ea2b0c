"""Optimizers: master weights for low-precision training, fused steps, Lamb and Lars."""

from ipex_inductor.optim._lamb import Lamb
from ipex_inductor.optim._lars import Lars, create_optimizer_lars
from ipex_inductor.optim.fused import fuse_step
from ipex_inductor.optim.masters import attach_master_weights, keep_public_dtype
from ipex_inductor.optim.tables import FUSED_OPTIMIZERS, SPLIT_OPTIMIZERS

__all__ = [
    "FUSED_OPTIMIZERS",
    "SPLIT_OPTIMIZERS",
    "Lamb",
    "Lars",
    "attach_master_weights",
    "create_optimizer_lars",
    "fuse_step",
    "keep_public_dtype",
]

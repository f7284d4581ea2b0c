"""Optimizer steps as one kernel."""

import logging

from torch.optim import Optimizer

from ipex_inductor.optim.step import wrap
from ipex_inductor.optim.tables import FUSED_OPTIMIZERS, names

log = logging.getLogger(__name__)


def fuse_step(optimizer: Optimizer) -> str | None:
    """Replace the step of `optimizer`, of exactly one of the fused types; None, or why not.

    The step it had is `optimizer._original_step`. There is no kernel yet: PyTorch's own step stands
    in, whose results are the same to the bit.
    """
    if type(optimizer) not in FUSED_OPTIMIZERS:
        return f"no fused step for {type(optimizer).__name__}, only for {names(FUSED_OPTIMIZERS)}"
    wrap(optimizer)
    vars(optimizer)["fused"] = True
    log.info("step of %s: no kernel yet, PyTorch's own stands in", type(optimizer).__name__)
    return None

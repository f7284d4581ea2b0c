"""Optimizer steps as one kernel."""

from torch.optim import Optimizer

from ipex_inductor.optim.tables import FUSED_OPTIMIZERS, names


def fuse_step(optimizer: Optimizer) -> str | None:
    """Replace the step of `optimizer`, of exactly one of the fused types; None, or why not.

    There is no kernel yet, so PyTorch's own step stays, with `fused=True` where the user asked it.
    """
    if type(optimizer) not in FUSED_OPTIMIZERS:
        return f"no fused step for {type(optimizer).__name__}, only for {names(FUSED_OPTIMIZERS)}"
    return f"the step of {type(optimizer).__name__} stays PyTorch's own: no kernel of ours yet"

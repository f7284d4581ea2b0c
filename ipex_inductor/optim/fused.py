"""Optimizer steps as one kernel."""

from torch.optim import Optimizer

from ipex_inductor.optim.tables import FUSED_OPTIMIZERS, names


def fuse_step(optimizer: Optimizer) -> str | None:
    """Replace the step of `optimizer`, of exactly one of the fused types; None, or why not.

    There is no kernel yet, so its own step stands in. What IPEX's users read is there as it was:
    `optimizer._original_step`, and `optimizer.fused`, which says that a fused step was asked for.
    """
    kind = type(optimizer)
    if kind not in FUSED_OPTIMIZERS:
        return f"no fused step for {kind.__name__}, only for {names(FUSED_OPTIMIZERS)}"
    own = vars(optimizer)
    own.setdefault("_original_step", optimizer.step)
    own["fused"] = True
    return f"no kernel of ours yet: the step of {kind.__name__} itself stands in, exact"

"""Checks of what Inductor has lowerings for."""

import torch


def is_lowered(op: torch._ops.OpOverload) -> bool:
    """Return whether Inductor generates code for an op, and does not call torch's kernel."""
    from torch._inductor import lowering

    return op in lowering.lowerings and op not in lowering.fallbacks

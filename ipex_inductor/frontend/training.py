"""Training: master weights beside low-precision parameters, and fused steps."""

from typing import Any

import torch
from torch import nn

from ipex_inductor.errors import ArgumentError
from ipex_inductor.frontend.casting import HALF, NOTHING, announce, castable
from ipex_inductor.frontend.knobs import Knobs
from ipex_inductor.frontend.notes import Notes
from ipex_inductor.optim import SPLIT_OPTIMIZERS, attach_master_weights, fuse_step
from ipex_inductor.optim.kernels import KNOB as FUSE

SPLIT = "split_master_weight_for_bf16"
NOT_FUSED = (
    "IPEX does not non-fused split master weight for bf16 training, have reset "
    "split_master_weight_for_bf16 flag to False. If you want to use split_master_weight_for_bf16. "
    "Please set both split_master_weight_for_bf16 and fuse_update_step to True."
)


def train(
    model: nn.Module, optimizer: Any, dtype: torch.dtype | None, knobs: Knobs, notes: Notes
) -> None:
    """Cast the castable parameters, with a master weight each, and fuse the step of `optimizer`.

    Args:
        model: the model in training mode, changed in place.
        optimizer: its optimizer, changed in place.
        dtype: the dtype to cast to; others than bf16 and fp16 cast nothing.
        knobs: the knobs in force.
        notes: the report.
    """
    if dtype in HALF:
        _attach(model, optimizer, dtype, _splits(optimizer, dtype, knobs, notes), notes)
    if FUSE in knobs:
        reason = fuse_step(optimizer, notes.report)
        if reason is None:
            notes.record_applied(FUSE, where=type(optimizer).__name__)
        else:
            notes.record_rejected(FUSE, reason)


def _attach(
    model: nn.Module, optimizer: Any, dtype: torch.dtype, split: bool, notes: Notes
) -> None:
    params = castable(model, dtype, "training", notes)
    if not params:
        notes.record_rejected("dtype", NOTHING.format(dtype))
        return
    dtypes = dict.fromkeys(params, torch.float32)
    try:
        attach_master_weights(model, optimizer, params, dtype, split=split)
    except ArgumentError as error:  # before anything was cast
        notes.record_rejected("dtype", str(error))
        return
    announce(model, dtypes)
    notes.record_applied("dtype", f"{len(params)} parameters to {dtype}")
    notes.record_applied(*((SPLIT,) if split else ("dtype", "with fp32 master weights")))


def _splits(optimizer: Any, dtype: torch.dtype, knobs: Knobs, notes: Notes) -> bool:
    if SPLIT not in knobs:
        return False
    reason = text = ""
    if dtype is not torch.bfloat16:
        reason = f"{dtype} is no half of float32: master weights are whole"
    elif FUSE not in knobs:
        reason = text = NOT_FUSED
    elif type(optimizer) not in SPLIT_OPTIMIZERS:
        reason = text = _describe_unsupported(optimizer)
    if reason:
        notes.record_rejected(SPLIT, reason, text=text)
    return not reason


def _describe_unsupported(optimizer: Any) -> str:
    devices = (p.device.type for group in optimizer.param_groups for p in group["params"])
    device = next(devices, "cpu").upper()
    return (
        f"IPEX {device} does not support fused/fused split update for {type(optimizer)} will use "
        f"non-fused master weight update for bf16 training on {device}."
    )

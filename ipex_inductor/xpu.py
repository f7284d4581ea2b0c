"""IPEX's names of `torch.xpu` or `ipex.xpu`; torch has all of them by now except these.

Every name of `torch.xpu` is here too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.xpu import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)

from ipex_inductor import frontend
from ipex_inductor.ipex_api import math_mode
from ipex_inductor.ipex_api.math_mode import FP32MathMode
from ipex_inductor.ipex_api.memory_table import memory_table
from ipex_inductor.nn.functional import nms, roi_align
from ipex_inductor.optim import Lars

__all__ = [
    "FP32MathMode",
    "amp",
    "empty_cache",
    "fp32_math_mode",
    "get_fp32_math_mode",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "nms",
    "optim",
    "optimize",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "roi_align",
    "set_fp32_math_mode",
]


def __getattr__(name: str) -> Any:
    return getattr(torch.xpu, name)


def optimize(
    model: Any,
    dtype: torch.dtype | None = None,
    optimizer: Any = None,
    level: str = "O1",
    inplace: bool = False,
    conv_bn_folding: bool | None = None,
    linear_bn_folding: bool | None = None,
    weights_prepack: bool | None = None,
    replace_dropout_with_identity: bool | None = None,
    optimize_lstm: bool | None = None,
    split_master_weight_for_bf16: bool | None = None,
    fuse_update_step: bool | None = None,
    auto_kernel_selection: bool | None = None,
    sample_input: Any = None,
    graph_mode: bool | None = None,
) -> Any:
    """Prepare a model for inference, or with its optimizer for training, on any device.

    This is `ipex_inductor.optimize` without `concat_linear`, as IPEX had it.

    Args:
        model: a module.
        dtype: torch.bfloat16 or torch.float16 to cast parameters; None: no cast.
        optimizer: the optimizer, for training.
        level: "O1" sets the options left at None, "O0" sets none.
        inplace: True to change the model itself instead of a copy.
        conv_bn_folding: fold batch norms into convolutions.
        linear_bn_folding: fold batch norms into linear layers.
        weights_prepack: no effect; backend `ipex` lays out weights for oneDNN in inference.
        replace_dropout_with_identity: remove dropout.
        optimize_lstm: no effect; torch runs nn.LSTM on oneDNN.
        split_master_weight_for_bf16: store fp32 weights as bf16 and their lower halves.
        fuse_update_step: use fused optimizer steps.
        auto_kernel_selection: with `graph_mode`, compile in mode max-autotune.
        sample_input: a tensor, tuple or dict of arguments that show how `forward` is called.
        graph_mode: compile the result with backend `ipex`.

    Returns:
        The model, or (model, optimizer).
    """
    return frontend.optimize(
        model,
        dtype,
        optimizer,
        level,
        inplace,
        conv_bn_folding,
        linear_bn_folding,
        weights_prepack,
        replace_dropout_with_identity,
        optimize_lstm,
        split_master_weight_for_bf16,
        fuse_update_step,
        auto_kernel_selection,
        sample_input,
        graph_mode,
    )


def set_fp32_math_mode(mode: FP32MathMode = FP32MathMode.FP32, device: str = "xpu") -> None:
    """Call `ipex_inductor.set_fp32_math_mode`, by default for Intel GPUs."""
    math_mode.set_fp32_math_mode(mode, device)


def get_fp32_math_mode(device: str = "xpu") -> FP32MathMode:
    """Call `ipex_inductor.get_fp32_math_mode`, by default for Intel GPUs."""
    return math_mode.get_fp32_math_mode(device)


@contextmanager
def fp32_math_mode(mode: FP32MathMode) -> Iterator[None]:
    """Set the math mode of Intel GPUs inside the block."""
    before = get_fp32_math_mode()
    set_fp32_math_mode(mode)
    try:
        yield
    finally:
        set_fp32_math_mode(before)


class _Autocast(torch.amp.autocast):
    """`torch.amp.autocast("xpu", ...)`."""

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__("xpu", dtype, enabled, cache_enabled)


optim = SimpleNamespace(Lars=Lars)
amp = SimpleNamespace(autocast=_Autocast, GradScaler=partial(torch.amp.GradScaler, "xpu"))


def memory_summary(device: torch.types.Device = None, abbreviated: bool = False) -> str:
    """Return `torch.xpu.memory_stats(device)` as a table, as `torch.cuda.memory_summary` does.

    Rows that XPU's allocator does not count are left out; `abbreviated` leaves out the pools.
    """
    number = torch.xpu._utils._get_device_index(device, optional=True)
    return memory_table(memory_stats(number), "XPU", number, abbreviated)

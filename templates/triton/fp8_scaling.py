"""Updates of FP8 scales in one Triton kernel, which equals the ops of torch bit for bit.

It reads and writes all columns of a scaling state: those of a model's inputs and weights, or of its
gradients. Ops of torch take 16 launches for it.
"""

import functools

import torch
from torch import Tensor

from ipex_inductor.ops.quant.fp8_states import HISTORY, SPACE, Settings
from ipex_inductor.reporting.decisions import warn_once
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.kernel_text import read_kernel_text
from ipex_inductor.templates.optimizer.step_cuda import VECTOR, On, load_triton_kernel

SOURCE = read_kernel_text("triton/fp8_scaling.py.jinja")
ROWS, COLUMNS, WARPS = 64, 32, 4  # of a tile, which 128 threads hold in 16 registers each
MOST = 2**31 - 1  # of arguments in 32 bits
CONSTANTS = {"ROWS": ROWS, "COLUMNS": COLUMNS, "SPACE": SPACE, "HISTORY": HISTORY}
SIGNATURE = {
    "state": "*fp32",
    "scales": "*fp32",
    **dict.fromkeys(("numerator", "largest", "tiny"), "fp32"),
    **dict.fromkeys(("interval", "most_recent", "length", "tensors"), "i32"),
}


def update_in_one_kernel(state: Tensor, largest: float, settings: Settings) -> Tensor | None:
    """Return `fp8_states.update_by_torch`, computed by one kernel; None if no kernel can.

    A warning has the reason.

    Args:
        state: [3 + length, tensors] on an NVIDIA GPU.
        largest: the largest finite number of the FP8 dtype.
        settings: of the update.
    """
    kernel = _load(state.device)
    reason = kernel if isinstance(kernel, str) else _why_not(state, settings)
    if isinstance(kernel, str) or reason:
        warn_once(
            f"FP8 scales on {state.device} are updated by 16 kernels instead of one: {reason}"
        )
        return None
    rows, tensors = state.shape
    scales = state.new_empty(2, tensors, SPACE)
    with On(state.device) as stream:
        kernel(
            -(-tensors // COLUMNS),
            stream,
            (
                *(state.data_ptr(), scales.data_ptr()),
                *numbers(largest, settings, rows - HISTORY, tensors),
            ),
        )
    return scales


def numbers(largest: float, settings: Settings, length: int, tensors: int) -> tuple[float, ...]:
    """Return the arguments of the kernel that are no addresses."""
    limits = torch.finfo(torch.float32)
    return (
        *(largest * 2.0**-settings.margin, limits.max, limits.tiny),
        *(settings.interval, int(settings.most_recent), length, tensors),
    )


def _why_not(state: Tensor, settings: Settings) -> str:
    """Return why the kernel cannot update a state, "" if it can."""
    if not state.is_contiguous() or state.data_ptr() % VECTOR:
        return f"the state does not lie row by row at a multiple of {VECTOR} bytes"
    if settings.interval > MOST:
        return f"the interval is above {MOST}"
    return ""


@functools.cache
def _load(device: torch.device) -> cuda.Kernel | str:
    """Return the kernel on a GPU, or why there is none."""
    if torch.version.hip:
        return "the kernel is for NVIDIA GPUs"
    try:
        return load_triton_kernel(
            SOURCE, "update", device, {"template": "fp8_scaling"}, SIGNATURE, CONSTANTS, WARPS
        )
    except NotBuiltError as error:
        return str(error)

"""Kernels of fused optimizer steps, compiled for an absent GPU or a level of CPUs.

They are entries of the kernel cache that do not depend on torch: any build of it finds them.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.optim import Optimizer

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import FUSED_OPTIMIZERS, kernels, norms
from ipex_inductor.optim.launching import launch_groups_cuda
from ipex_inductor.optim.planning import list_kernels
from ipex_inductor.optim.weights import TABLE
from ipex_inductor.templates.build.cpp import ship
from ipex_inductor.templates.optimizer.step import StepKernel, cpp_source
from ipex_inductor.templates.optimizer.step_cuda import has_kernels
from ipex_inductor.templates.tensor_reader.look_cpp import reader

ALIGNMENTS = (True, False)  # gradients that are views into one buffer may lie anywhere


def load_step(optimizer: Optimizer, device: torch.device, scaler: bool = False) -> None:
    """Compile everything that the first `FusedStep` of `optimizer` loads on `device`.

    On the CPU, which stands for the described one, torch itself reads gradients and computes their
    norms. The options of the optimizer's step (`clip_norm`, `zero_grad`) apply; gradients have
    their parameters' dtypes.

    Args:
        optimizer: Optimizer with a fused step.
        device: Device of the parameters.
        scaler: The step runs under `GradScaler`.

    Raises:
        ArgumentError: the optimizer has no fused step there.
        NotBuiltError: a kernel does not compile.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in FUSED_OPTIMIZERS or not has_kernels(device):
        advice = "Leave it out: its step then runs as in torch."
        raise ArgumentError("an optimizer with a fused step there", f"{name} on {device}", advice)
    state = vars(optimizer)
    options = state.get(kernels.OPTIONS) or kernels.Options()
    scaled, clips = scaler or options.clip_norm is not None, options.clip_norm is not None
    step_kernels = list_kernels(optimizer, state.get(TABLE, {}), scaled, options.zero_grad)
    if device.type == "cpu":
        for kernel in step_kernels:
            ship(partial(cpp_source, kernel), pairs(kernel.problem))
        reader.__wrapped__()  # also where this process has it already
        return
    tables = {
        k: {t for g in groups for t in _tables(k, g, scaler)} for k, groups in step_kernels.items()
    }
    for (kernel, variants), aligned in product(tables.items(), ALIGNMENTS):
        for tabled in variants:
            before = ["scalars"] * tabled + ["norms"] * launch_groups_cuda.adds_up(kernel)
            for name in ("step", *before):
                launch_groups_cuda.kernel_of(kernel, device, aligned, name, tabled)
    counting = [kernel for kernel, variants in tables.items() if True in variants]
    for which in _readings(step_kernels, counting, clips, scaler):
        for aligned in ALIGNMENTS:
            norms.parts(which[0], aligned, device, *which[1:])
    reader.__wrapped__()


def _tables(kernel: StepKernel, group: Mapping[str, Any], scaler: bool) -> set[bool]:
    """Return the forms that scalars may have: True for a table that the GPU makes.

    `CountingBatch` uses such tables. Both forms are needed for a learning rate that is a tensor, as
    its device is not known ahead.
    """
    counts = kernel.rule.counts
    is_table = counts and (group.get("capturable") or group.get("fused"))
    if is_table or (kernel.scaled and not (counts and scaler)):
        return {True}
    return {True, False} if isinstance(group["lr"], torch.Tensor) else {False}


def _readings(
    step_kernels: Mapping[StepKernel, Any], counting: list[StepKernel], clips: bool, scaler: bool
) -> Iterator[tuple[str, str, bool, bool, StepKernel | None]]:
    """Yield the kernels that read gradients before a step, as arguments of `norms.parts`.

    Each is gradient dtype, dtype of the norm, whether squares are summed, whether infinite and NaN
    elements are looked for, and the kernel whose scalars it makes, or None.
    """
    grads = dict.fromkeys(kernel.grad for kernel in step_kernels)
    real = "float64" if "float64" in grads else "float32"
    purposes = [(True, False)] * clips + [(clips, True), (False, True)] * scaler
    makes_scalars = counting if len(step_kernels) == 1 else []
    for grad, (squares, looks) in product(grads, dict.fromkeys(purposes)):
        for kernel in (None, *makes_scalars):
            yield grad, real, squares, looks, kernel

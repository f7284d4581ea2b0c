"""Kernels of fused optimizer steps, compiled for a GPU or a level of CPUs that is not here.

They are entries of the kernel cache that depend on nothing of torch: any build of it finds them.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.optim import Optimizer

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import FUSED_OPTIMIZERS, kernels, launch_groups_cuda, norms
from ipex_inductor.optim.planning import expected
from ipex_inductor.optim.weights import TABLE
from ipex_inductor.templates.build.cpp import ship
from ipex_inductor.templates.optimizer.step import StepKernel, cpp_source
from ipex_inductor.templates.optimizer.step_cuda import has_kernels
from ipex_inductor.templates.tensor_reader.look_cpp import reader

ALIGNMENTS = (True, False)  # gradients that are views into one buffer may lie anywhere


def load_step(optimizer: Optimizer, device: torch.device, scaler: bool = False) -> None:
    """Have all that the first `FusedStep` of `optimizer` loads once it is on `device`.

    On the CPU that is described; torch itself looks at gradients there and takes their norms.
    With what was asked of the step that it has (`clip_norm`, `zero_grad`) and, for `scaler`, under
    `GradScaler`; gradients have their parameters' dtypes. Raises `ArgumentError` for an optimizer
    without a fused step, `NotBuiltError` for what does not compile.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in FUSED_OPTIMIZERS or not has_kernels(device):
        todo = "Leave it out: it runs as torch has it."
        raise ArgumentError("an optimizer with a fused step there", f"{name} on {device}", todo)
    own = vars(optimizer)
    options = own.get(kernels.OPTIONS) or kernels.Options()
    scaled, clips = scaler or options.clip_norm is not None, options.clip_norm is not None
    found = expected(optimizer, own.get(TABLE, {}), scaled, options.zero_grad)
    if device.type == "cpu":
        for kernel in found:
            ship(partial(cpp_source, kernel), pairs(kernel.problem))
        reader.__wrapped__()  # also where this process has it already
        return
    tables = {k: {t for g in groups for t in _tables(k, g, scaler)} for k, groups in found.items()}
    for (kernel, made), aligned in product(tables.items(), ALIGNMENTS):
        for tabled in made:
            before = ["scalars"] * tabled + ["norms"] * launch_groups_cuda.adds_up(kernel)
            for name in ("step", *before):
                launch_groups_cuda.kernel_of(kernel, device, aligned, name, tabled)
    counting = [kernel for kernel, made in tables.items() if True in made]
    for which in _readings(found, counting, clips, scaler):
        for aligned in ALIGNMENTS:
            norms.parts(which[0], aligned, device, *which[1:])
    reader.__wrapped__()


def _tables(kernel: StepKernel, group: Mapping[str, Any], scaler: bool) -> set[bool]:
    """Whether scalars are a table, which the GPU makes, as `CountingBatch` has it.

    Nobody knows where a rate that is a tensor will lie.
    """
    counts = kernel.rule.counts
    there = counts and (group.get("capturable") or group.get("fused"))
    if there or (kernel.scaled and not (counts and scaler)):
        return {True}
    return {True, False} if isinstance(group["lr"], torch.Tensor) else {False}


def _readings(
    found: Mapping[StepKernel, Any], counting: list[StepKernel], clips: bool, scaler: bool
) -> Iterator[tuple[str, str, bool, bool, StepKernel | None]]:
    """What reads gradients before a step: dtype, that of the norm, what it is for, scalars."""
    grads = dict.fromkeys(kernel.grad for kernel in found)
    real = "float64" if "float64" in grads else "float32"
    asked = [(True, False)] * clips + [(clips, True), (False, True)] * scaler
    makes_scalars = counting if len(found) == 1 else []
    for grad, (squares, looks) in product(grads, dict.fromkeys(asked)):
        for kernel in (None, *makes_scalars):
            yield grad, real, squares, looks, kernel

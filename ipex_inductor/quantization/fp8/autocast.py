"""`fp8_autocast`: the block in which prepared layers compute in FP8."""

from contextlib import ContextDecorator
from typing import Any, Self

import torch
from torch import distributed

from ipex_inductor import compat
from ipex_inductor.errors import ArgumentError, DeviceError, QuantizationError
from ipex_inductor.ops.quant import fp8, fp8_states
from ipex_inductor.quantization.fp8.current import CURRENT, Settings
from ipex_inductor.quantization.fp8.recipe import DelayedScaling
from ipex_inductor.quantization.fp8.recomputation import watch_region

DEFAULT = DelayedScaling()
OUTSIDE = Settings()


class fp8_autocast(ContextDecorator):
    """Compute prepared linear layers in FP8 inside the block, and as before outside of it.

    The outermost block updates the scales of inputs and weights when it ends without an exception:
    if gradients are enabled at its begin and end, or if it calibrates. Scales of gradients are
    updated at the end of each backward. Blocks nest: `enabled` of the innermost one counts.

    Args:
        enabled: compute in FP8.
        calibrating: record the largest magnitudes and update scales, with `enabled=False` too, and
            without gradients.
        fp8_recipe: None for the recipe of the outer block, or `DelayedScaling()`.
        fp8_group: processes over which largest magnitudes are reduced; None for all.
        device: type of the model's device, "cpu" or "cuda"; None for any of them. The state of a
            model lies on its own device.

    Raises:
        ArgumentError: for a recipe or a group of another type.
        DeviceError: for another device.
        QuantizationError: for an inner block with another recipe or group.
    """

    def __init__(
        self,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: DelayedScaling | None = None,
        fp8_group: Any = None,
        device: str | torch.device | None = None,
    ) -> None:
        if not isinstance(fp8_recipe, DelayedScaling | None):
            raise ArgumentError("a DelayedScaling", repr(fp8_recipe), "Pass fp8_recipe=None.")
        _check_group(fp8_group)
        check_device(device)
        self.enabled, self.calibrating = bool(enabled), bool(calibrating)
        self.recipe, self.process_group = fp8_recipe, fp8_group

    def __enter__(self) -> Self:
        if not torch.compiler.is_compiling():
            watch_region()
        if CURRENT.depth == 0:
            CURRENT.traced = torch.compiler.is_compiling()
            CURRENT.traced_models = []
            if not CURRENT.traced:
                fp8_states.take_recorded()  # of a compiled block, which updated its own models
        if self.enabled or self.calibrating:
            self._join_pass()
        CURRENT.outer = (*CURRENT.outer, (CURRENT.enabled, CURRENT.calibrating))
        CURRENT.depth += 1
        CURRENT.enabled, CURRENT.calibrating = self.enabled, self.calibrating
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        CURRENT.depth -= 1
        CURRENT.enabled, CURRENT.calibrating = CURRENT.outer[-1]
        CURRENT.outer = CURRENT.outer[:-1]
        if CURRENT.depth > 0:
            return
        models: list[Any] = CURRENT.traced_models
        if not CURRENT.traced:
            compiling = torch.compiler.is_compiling()  # after a graph break inside the block
            models = list(_take_untraced() if compiling else fp8_states.take_recorded())
        ended = CURRENT.settings()
        CURRENT.traced, CURRENT.traced_models = False, []
        CURRENT.restore(OUTSIDE)
        if kind is not None or ended.recipe is None or not ended.recording:
            return
        if torch.is_grad_enabled() or ended.calibrated:
            for model in models:
                model.update_forward(ended.recipe, ended.group)

    def _join_pass(self) -> None:
        """Begin a pass, or check that this block has its recipe and group."""
        recipe = self.recipe or CURRENT.recipe or DEFAULT
        group = CURRENT.group
        if CURRENT.recipe is None or self.process_group is not None:
            group = compat.group_name(self.process_group) if recipe.reduce_amax else ""
        if CURRENT.recipe is None:
            CURRENT.recording = torch.is_grad_enabled() and not CURRENT.recomputing
        elif (recipe, group) != (CURRENT.recipe, CURRENT.group):
            raise QuantizationError(
                "one recipe and one group in nested fp8_autocast blocks",
                f"{recipe} inside of {CURRENT.recipe}, group {group!r} of {CURRENT.group!r}",
                "Omit fp8_recipe and fp8_group in the inner block.",
            )
        CURRENT.recipe, CURRENT.group = recipe, group
        if self.calibrating and not CURRENT.recomputing:
            CURRENT.recording = CURRENT.calibrated = True


@compat.left_to_eager_mode
def _take_untraced() -> list[fp8_states.Model]:
    """Return the models that ops have marked at run time."""
    return fp8_states.take_recorded()


def has_fp8_support() -> bool:
    """Return True: CPUs without FP8 instructions compute the same results with others."""
    return True


def _check_group(group: Any) -> None:
    if group is None:
        return
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        raise ArgumentError("a torch.distributed.ProcessGroup", repr(group), "Pass fp8_group=None.")


def check_device(device: str | torch.device | None) -> None:
    """Raise `DeviceError` unless FP8 GEMMs exist for a type of device; None is any of them."""
    if device is None:
        return
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    if kind not in fp8.DEVICES:
        raise DeviceError(
            'device "cpu" or "cuda"', repr(device), "FP8 GEMMs exist for these devices alone."
        )


# Compiled by themselves they would take a block of eager mode for one that is compiled.
compat.compile_with_callers_alone(fp8_autocast.__enter__, fp8_autocast.__exit__)

"""Scaling state of a prepared model: scales and histories of all its layers, in flat tensors."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from ipex_inductor.ops.quant import fp8, fp8_states
from ipex_inductor.quantization.fp8.current import CURRENT
from ipex_inductor.quantization.fp8.recipe import DelayedScaling

FORWARD_TENSORS = 3  # input, weight and output of a layer, in this order
NAME = "fp8_scaling"  # of the module in the prepared model
LENGTH = 1024  # passes in a history before a recipe asks for another number
SCALES = 3  # dimensions of `scales`
STATES = ("forward_state", "gradient_state")
_numbers = itertools.count()


def _update_on_cuda(state: Tensor, largest: float, settings: fp8_states.Settings) -> Tensor | None:
    from ipex_inductor.templates.triton.fp8_scaling import update_in_one_kernel

    return update_in_one_kernel(state, largest, settings)


fp8_states.KERNELS["cuda"] = _update_on_cuda


class ScalingState(nn.Module):
    """Scales, their reciprocals and histories of the largest magnitudes.

    `forward_state` has three columns for each layer: input, weight and output. Outputs are not
    rounded, so theirs stay empty, as in Transformer Engine. `gradient_state` has one column for
    each layer. Two tensors, because a compiled forward writes one and its backward the other.

    Rows: scale, reciprocal, count of updates modulo the interval, the largest magnitudes of the
    running pass, then those of earlier passes, oldest first.

    `scales` are both first rows of `forward_state` as a tensor that is replaced, never written: a
    region that is run again for its backward reads those of its own pass.

    Args:
        layers: number of layers.
        device: of the model.
    """

    forward_state: Tensor
    gradient_state: Tensor
    scales: Tensor

    def __init__(self, layers: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        with ordinary_tensors():
            for name, tensors in zip(STATES, (FORWARD_TENSORS * layers, layers), strict=True):
                state = torch.zeros(fp8_states.HISTORY + LENGTH, tensors, device=device)
                state[[fp8_states.SCALE, fp8_states.SCALE_INV]] = 1
                self.register_buffer(name, state)
            self.register_buffer("scales", self._copy_scales(), persistent=False)
        self.ran_without_gradients = False
        self._take_number()

    def _take_number(self) -> None:
        self.number = next(_numbers)
        fp8_states.MODELS[self.number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which is a model of its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._replace_inference_tensors()
        if self.scales.dim() < SCALES:  # pickled when they lay side by side
            self.scales = self._copy_scales()
        self._take_number()

    def _copy_scales(self) -> Tensor:
        return fp8_states.space_scales(self.forward_state)

    def _replace_inference_tensors(self) -> None:
        """Replace buffers that were made under `torch.inference_mode`: training needs others."""
        with ordinary_tensors():
            for name, state in self._buffers.items():
                if state is not None and state.is_inference():
                    self._buffers[name] = state.clone()

    def note_call(self, *_: object) -> None:
        """Remember that a compiled outermost `fp8_autocast` block has to update this model.

        It is a hook of the prepared module. Ops mark the model where the block is not compiled.
        """
        if CURRENT.traced and not self.is_noted():
            CURRENT.traced_models.append(self)

    def is_noted(self) -> bool:
        """Return True if a compiled outermost block will update this model."""
        return any(model is self for model in CURRENT.traced_models)

    def update_forward(self, recipe: DelayedScaling, group: str) -> None:
        """Update the scales of inputs and weights after a pass.

        Args:
            recipe: of the pass.
            group: name of the process group, "" for none.
        """
        if torch.compiler.is_compiling():
            self._update_forward(recipe, group)
            return
        with ordinary_tensors():
            self._update_forward(recipe, group)

    def _update_forward(self, recipe: DelayedScaling, group: str) -> None:
        settings = recipe.settings(group)
        rows = fp8_states.HISTORY + settings.length
        if len(self.forward_state) != rows:
            self.forward_state = _resize(self.forward_state, settings.length)
        # So that the next pass finds its final size.
        if not torch.compiler.is_compiling() and len(self.gradient_state) != rows:
            self.gradient_state = _resize(self.gradient_state, settings.length)
        largest = fp8.largest_finite(recipe.fp8_format.forward_dtype)
        self.scales = fp8_states.fp8_update(self.forward_state, largest, self.number, *settings)

    def update_gradients(self, dtype: torch.dtype, settings: fp8_states.Settings) -> None:
        """Update the scales of gradients after a backward.

        Args:
            dtype: of quantized gradients.
            settings: of the pass.
        """
        self.gradient_state = _resize(self.gradient_state, settings.length)
        fp8_states.fp8_update(self.gradient_state, fp8.largest_finite(dtype), -1, *settings)

    def reset_parameters(self) -> None:
        """Set all scales to 1 and empty the histories, as after `to_empty`."""
        with ordinary_tensors():
            for state in (self.forward_state, self.gradient_state):
                state.zero_()
                state[: fp8_states.SCALE_INV + 1] = 1
            self.scales = self._copy_scales()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the state with the model; it stays in fp32 when the model is cast."""
        with ordinary_tensors():
            for name, state in self._buffers.items():
                if state is not None:
                    moved = fn(state)
                    same = moved.dtype == torch.float32
                    self._buffers[name] = moved if same else state.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load both states; histories of another length become this model's."""
        with ordinary_tensors():
            for name in STATES:
                loaded, own = state_dict.get(f"{prefix}{name}"), getattr(self, name)
                if loaded is not None and loaded.shape[1:] == own.shape[1:]:
                    setattr(self, name, _resize(own, loaded.shape[0] - fp8_states.HISTORY))
            super()._load_from_state_dict(state_dict, prefix, *args)
            self._replace_inference_tensors()  # assigned ones
            self.scales = self._copy_scales()


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors that a backward can save, under `torch.inference_mode` too."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _resize(state: Tensor, length: int) -> Tensor:
    """Return a state with a history of another length, in the same memory.

    The oldest entries are cut off, or empty ones added. A backward that is still to run writes to
    the first row of that memory, whatever the length was in its forward.
    """
    rows, tensors = state.shape
    if rows == fp8_states.HISTORY + length:
        return state
    head, past = state[: fp8_states.HISTORY + 1], state[fp8_states.HISTORY + 1 :]
    kept = min(len(past), length - 1)
    empty = state.new_zeros(length - 1 - kept, tensors)
    content = torch.cat([head, empty, past[len(past) - kept :]])
    if torch.compiler.is_compiling():  # it is a forward state, which no backward writes
        return content
    resized: Tensor = state.data.resize_(content.shape)
    return resized.copy_(content)

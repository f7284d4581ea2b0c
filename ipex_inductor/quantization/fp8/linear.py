"""`FP8Linear`: a linear layer that computes in FP8 inside of `fp8_autocast`."""

import torch
from torch import Tensor, nn

from ipex_inductor import compat
from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant import fp8, fp8_states
from ipex_inductor.quantization.fp8.current import CURRENT
from ipex_inductor.quantization.fp8.multiply import multiply
from ipex_inductor.quantization.fp8.recipe import DelayedScaling
from ipex_inductor.quantization.fp8.recomputation import NON_REENTRANT, watch_region
from ipex_inductor.quantization.fp8.state import FORWARD_TENSORS, NAME, ScalingState

INPUT, WEIGHT = 0, 1  # columns of a layer in the forward state; the third is the output


class FP8Linear(nn.Linear):
    """A linear layer that computes in FP8 inside of `fp8_autocast`, and as `nn.Linear` outside.

    `prepare_fp8` makes it of the linear layers of a model. One that is constructed has a scaling
    state of its own.

    Args:
        in_features: size of each input.
        out_features: size of each output.
        bias: whether a bias is added.
        device: of parameters and state.
        dtype: of the parameters.
    """

    _fp8: tuple[ScalingState, int]  # and the number of the layer; a tuple hides it from state_dict

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        state = ScalingState(1, self.weight.device)
        self.add_module(NAME, state)
        self.register_forward_pre_hook(state.note_call)
        self._fp8 = state, 0

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`."""
        if not torch.compiler.is_compiling():
            self._check_region()
        recipe = CURRENT.recipe
        if recipe is None or not (CURRENT.enabled or CURRENT.calibrating):
            return super().forward(input)
        state, layer = self._fp8
        if torch.compiler.is_compiling() and CURRENT.traced and not state.is_noted():
            raise QuantizationError(
                "the module that prepare_fp8 returned to be called in a compiled fp8_autocast",
                "a call of one of its parts",
                "Open fp8_autocast outside of what is compiled.",
            )
        column = FORWARD_TENSORS * layer
        if not CURRENT.enabled:
            if CURRENT.recording:
                _record(state, column, fp8.compute_amax(input), fp8.compute_amax(self.weight))
            return super().forward(input)
        return self._multiply(input, state, layer, recipe)

    def _multiply(
        self, input: Tensor, state: ScalingState, layer: int, recipe: DelayedScaling
    ) -> Tensor:
        """Return the output computed in FP8.

        Args:
            input: [..., in_features].
            state: of the model.
            layer: number of this layer in it.
            recipe: of the pass.
        """
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        rows = input.reshape(-1, self.in_features)
        scales, column = state.scales, FORWARD_TENSORS * layer
        if not torch.compiler.is_compiling() and scales.is_inference():
            # A compiled block made them under torch.inference_mode.
            scales = scales.clone()
        output: Tensor
        output, input_amax, weight_amax = multiply(
            rows,
            self.weight,
            self.bias,
            scales[:, column + INPUT, 0],
            scales[:, column + WEIGHT, 0],
            state.gradient_state,
            layer,
            state.number,
            recipe.fp8_format.forward_dtype,
            recipe.fp8_format.gradient_dtype,
            *recipe.settings(CURRENT.group),
        )
        if CURRENT.recording:
            _record(state, column, input_amax, weight_amax)
        return output.reshape(*input.shape[:-1], self.out_features)

    def _check_region(self) -> None:
        """Prepare for a recomputation, and refuse one that would not compute in FP8."""
        CURRENT.traced = False  # a block is not compiled as a whole if a layer runs in eager mode
        watch_region()
        state = self._fp8[0]
        without_gradients = CURRENT.enabled and CURRENT.recording and not torch.is_grad_enabled()
        if without_gradients:
            state.ran_without_gradients = True
        if not state.ran_without_gradients or CURRENT.enabled or not torch.is_grad_enabled():
            return
        if compat.backward_number() is not None and not CURRENT.recomputing:
            raise QuantizationError(
                "no reentrant checkpoint around layers in FP8", "a recomputation", NON_REENTRANT
            )


def _record(state: ScalingState, column: int, input_amax: Tensor, weight_amax: Tensor) -> None:
    """Record the largest magnitudes of a layer's input and weight."""
    columns = [column + INPUT, column + WEIGHT]
    fp8_states.fp8_record(state.forward_state, [input_amax, weight_amax], columns, state.number)


compat.compile_with_callers_alone(FP8Linear._check_region, ScalingState.note_call)

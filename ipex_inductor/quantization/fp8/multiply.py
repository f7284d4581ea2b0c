"""The product of a linear layer and both of its gradients, in FP8."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ipex_inductor.ops.quant import fp8, fp8_states


class Multiply(Function):
    """`x @ weight.T + bias` in FP8, with gradients whose GEMMs are in FP8 too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_scales: Tensor,
        weight_scales: Tensor,
        gradient_state: Tensor,
        layer: int,
        model: int,
        forward_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        *settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the product, and the largest magnitudes of x and weight.

        Args:
            ctx: keeps what the gradients need.
            x: [M, K].
            weight: [N, K].
            bias: [N], or None.
            input_scales: scale of x, and its reciprocal.
            weight_scales: scale of the weight, and its reciprocal.
            gradient_state: of the model.
            layer: column in that state.
            model: number of the model.
            forward_dtype: FP8 dtype of x and weight.
            gradient_dtype: FP8 dtype of the gradient of the output.
            settings: of updates, fields of `fp8_states.Settings`.
        """
        x8, x_amax = fp8.fp8_quantize(x, input_scales[0], forward_dtype)
        weight8, weight_amax = fp8.fp8_quantize(weight, weight_scales[0], forward_dtype)
        product = fp8.fp8_gemm(x8, weight8, input_scales[1], weight_scales[1], bias, x.dtype, True)
        # A parameter is there anyway; its values in FP8 would take memory until the backward.
        saved = weight if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(x8, saved, input_scales, weight_scales)
        ctx.gradient_state = gradient_state  # not saved: hooks on saved tensors may copy them
        ctx.constants = layer, forward_dtype, gradient_dtype, model, settings
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(x_amax, weight_amax)
        return product, x_amax, weight_amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x8, weight, input_scales, weight_scales = ctx.saved_tensors
        layer, forward_dtype, gradient_dtype, model, settings = ctx.constants
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needed = ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        scale, scale_inv = fp8_states.fp8_read_scales(ctx.gradient_state, [layer])[:, 0, 0].unbind()
        gradient8, amax = fp8.fp8_quantize(gradient, scale, gradient_dtype)
        fp8_states.fp8_record_gradients(
            ctx.gradient_state, [amax], [layer], gradient_dtype, model, *settings
        )
        if needed[0]:
            weight8 = fp8.fp8_quantize_transposed(weight, weight_scales[0], forward_dtype, amax)
            of_x = fp8.fp8_gemm(
                gradient8, weight8, scale_inv, weight_scales[1], None, x_dtype, False
            )
        if needed[1]:
            of_weight = fp8.fp8_gemm(
                gradient8.t(), x8.t(), scale_inv, input_scales[1], None, weight_dtype, False
            )
        if needed[2]:
            of_bias = gradient.float().sum(0).to(bias_dtype)
        return of_x, of_weight, of_bias, *[None] * (len(needed) - 3)


multiply: Any = Multiply.apply

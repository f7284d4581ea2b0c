"""Linear layers on quantized weights: int8, int4, NF4 and FP8 with scales of groups along K.

The tensors are row-major and lie as checkpoints and `state_dict` have them. No packed copy is made.
`templates/cpu/weight_only.py` registers the kernel for CPUs. This file has the reference in plain
torch, for every device.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.errors import ArgumentError, QuantizationError
from ipex_inductor.ops.common.defining import Arguments, fake, op

STORED = {  # weight dtypes, and how each is stored
    "int8": torch.int8,
    "int4": torch.uint8,
    "nf4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}
NIBBLES = ("int4", "nf4")  # two elements a byte: even k in the low half
COMPUTES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
INTEGERS = {"int8": torch.int8, "int4": torch.uint8}  # weight dtypes with zero points, and theirs
SYMMETRIC = {"int8": 0, "int4": 8}  # the zero point where none is given
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# The 16 values of NF4: quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
MOST = 127.0  # largest magnitude of a quantized activation
# Below it a group of activations counts as this large: its reciprocal times 127 is a finite float.
SMALLEST = 2.0**-119


class Scheme(NamedTuple):
    """How a weight is stored and computed with.

    Args:
        weight_dtype: a key of `STORED`.
        group_size: elements along K that share a scale.
        compute: a key of `COMPUTES`.
    """

    weight_dtype: str
    group_size: int
    compute: str


@op("weight_only_linear")
def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    weight_dtype: str,
    group_size: int,
    compute: str,
) -> Tensor:
    """Return `x[..., order] @ W.T + bias` for a weight W that is stored quantized.

    `W[n, k]` is `(q - zero) * scale` for integers, `NF4[q] * scale` and `fp8 * scale`. Sums are in
    fp32, the bias is added in fp32, and the result is rounded once.

    Args:
        x: [..., K] in fp32, bf16 or fp16.
        weight: "int8": [N, K] in int8; "fp8": [N, K] in float8_e4m3fn; "int4" and "nf4":
            [N, ceil(K / 2)] in uint8, with k = 2 j in the low nibble of byte j.
        scales: [N, ceil(K / group_size)] in fp32, fp16 or bf16.
        zeros: zero points of the groups, [N, groups]: int8 of "int8", uint8 of "int4" (0 to 16);
            None for 0 of "int8" and 8 of "int4".
        order: [K] in int32, the element of x by which each k is multiplied; None for k itself.
        bias: [N] in floating point, or None.
        weight_dtype: "int8", "int4", "nf4" or "fp8".
        group_size: elements along K that share a scale. The last group may be shorter.
        compute: "float32", "bfloat16" or "float16", to which activations and the dequantized weight
            are rounded; or "int8": activations are quantized for each row and group, see
            `quantize_activations`.

    Returns:
        [..., N] in the dtype of x, contiguous.

    Raises:
        ArgumentError: for a dtype of a tensor that the op does not read.
        QuantizationError: for shapes that do not fit, and schemes that do not exist.
    """
    scheme = Scheme(weight_dtype, group_size, compute)
    check(x, weight, scales, zeros, order, bias, scheme)
    return compute_reference(x, weight, scales, zeros, order, bias, scheme).contiguous()


@fake(weight_only_linear)
def _(call: Arguments) -> object:
    scheme = Scheme(call.weight_dtype, call.group_size, call.compute)
    check(call.x, call.weight, call.scales, call.zeros, call.order, call.bias, scheme)
    return call.x.new_empty((*call.x.shape[:-1], call.weight.shape[0]))


def _keep_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the backward reads: the quantized weight, not the activations."""
    x, weight, scales, zeros, order, bias, *scheme = inputs
    ctx.save_for_backward(weight, scales, zeros, order)
    ctx.scheme, ctx.depth, ctx.dtype = Scheme(*scheme), x.shape[-1], x.dtype
    ctx.has_bias = bias is not None and bias.requires_grad


def _multiply_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of the activations; quantized weights have none.

    Raises:
        QuantizationError: for compute "int8", whose rounding of activations has no gradient, and a
            bias that requires one.
    """
    if ctx.scheme.compute == "int8" or ctx.has_bias:
        raise QuantizationError(
            "gradients of activations alone, computed in floating point",
            'compute "int8"' if ctx.scheme.compute == "int8" else "a bias that requires a gradient",
            'Use compute "bfloat16" and bias.detach(), or call it under torch.no_grad().',
        )
    weight, scales, zeros, order = ctx.saved_tensors
    plain = dequantize_weight(weight, scales, zeros, ctx.scheme, ctx.depth)
    dtype = COMPUTES[ctx.scheme.compute]
    result = gradient.to(dtype).float() @ plain.to(dtype).float()
    if order is not None:
        result = result.index_select(-1, order.argsort())
    return (result.to(ctx.dtype), *[None] * 8)


weight_only_linear.register_autograd(_multiply_backward, setup_context=_keep_weight)


def compute_reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
) -> Tensor:
    """Return `ipex::weight_only_linear` in plain ops of torch, which Inductor can fuse.

    Args:
        x: [..., K].
        weight: as stored.
        scales: [N, groups].
        zeros: [N, groups], or None.
        order: [K], or None.
        bias: [N], or None.
        scheme: of the weight.
    """
    dtype, result_dtype = COMPUTES[scheme.compute], x.dtype
    if order is not None:
        x = x.index_select(-1, order)
    if dtype == torch.int8:
        dtype, x = torch.float32, dequantize_activations(x, scheme.group_size)
    plain = dequantize_weight(weight, scales, zeros, scheme, x.shape[-1]).to(dtype)
    values = x.to(dtype)
    if dtype != result_dtype or values.device.type == "cpu":  # sums of other dtypes are rounded
        values, plain = values.float(), plain.float()
    with torch.autocast(x.device.type, enabled=False):
        result = F.linear(values, plain)
    if bias is not None:
        result = result.float() + bias.float()
    return result.to(result_dtype)


def dequantize_weight(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, depth: int
) -> Tensor:
    """Return the weight that quantized values stand for, [N, K] in fp32.

    Args:
        weight: as stored.
        scales: [N, groups].
        zeros: [N, groups], or None.
        scheme: of the weight.
        depth: K.
    """
    name = scheme.weight_dtype
    if name in NIBBLES:
        both = torch.stack([weight & 15, weight >> 4], -1)
        weight = both.flatten(-2)[:, :depth]
    if name == "nf4":
        values = _look_up_levels(weight)
    elif name == "fp8":
        values = weight.float()
    elif zeros is None:
        values = weight.float() - SYMMETRIC[name]
    else:
        values = weight.float() - expand_groups(zeros.float(), scheme.group_size, depth)
    return values * expand_groups(scales.float(), scheme.group_size, depth)


def _look_up_levels(codes: Tensor) -> Tensor:
    """Return the values of NF4 of codes, in fp32."""
    if codes.device.type == "cpu":
        # A tensor of constants would be an attribute of the traced graph: a lowering has none.
        levels = torch.cat([codes.new_full((1,), v, dtype=torch.float32) for v in NF4])
        return levels[codes.int()]
    values = torch.full_like(codes, NF4[0], dtype=torch.float32)
    for code, level in enumerate(NF4[1:], 1):  # Inductor makes one kernel of all these
        values = torch.where(codes == code, level, values)
    return values


def expand_groups(values: Tensor, group_size: int, depth: int) -> Tensor:
    """Return values of groups [..., groups] for each k: [..., K].

    Args:
        values: one for each group.
        group_size: elements along K of a group.
        depth: K.
    """
    if values.shape[-1] == 1:
        return values.expand(*values.shape[:-1], depth)
    groups = torch.arange(depth, device=values.device) // group_size
    return values.index_select(-1, groups)


def quantize_activations(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return activations as integers -127 to 127, and their scales.

    A group's scale is its largest magnitude divided by 127. A group with an infinite element or NaN
    has zeros as integers and NaN as its scale.

    Args:
        x: [..., K] in floating point.
        group_size: elements along K that share a scale.

    Returns:
        [..., K] and [..., groups], both in fp32.
    """
    exact = x.float()
    depth = exact.shape[-1]
    size = min(group_size, max(depth, 1))
    groups = -(-depth // size)
    padded = F.pad(exact, (0, groups * size - depth))
    split = padded.reshape(*exact.shape[:-1], groups, size)
    amax = split.abs().amax(-1) if depth else split.new_zeros(split.shape[:-1])
    is_finite = amax.isfinite()
    largest = torch.where(is_finite, amax, 1.0).clamp_min(SMALLEST)
    inverse = torch.full_like(largest, MOST) / largest
    scale = torch.where(is_finite, largest / MOST, torch.nan)
    steps = torch.round(split * inverse.unsqueeze(-1))
    steps = torch.where(is_finite.unsqueeze(-1), steps, 0.0)
    return steps.flatten(-2)[..., :depth], scale


def dequantize_activations(x: Tensor, group_size: int) -> Tensor:
    """Return activations [..., K] in fp32, rounded as `quantize_activations` rounds them."""
    steps, scale = quantize_activations(x, group_size)
    return steps * expand_groups(scale, group_size, x.shape[-1])


def check(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    scheme: Scheme,
) -> None:
    """Raise if `ipex::weight_only_linear` cannot be computed of these arguments.

    Raises:
        ArgumentError: for a dtype of a tensor.
        QuantizationError: for a scheme or a shape.
    """
    _check_scheme(scheme, zeros is not None)
    name = scheme.weight_dtype
    _check_dtype("x", x, FLOATS)
    _check_dtype(f'a weight of "{name}"', weight, (STORED[name],))
    _check_dtype("scales", scales, FLOATS)
    if zeros is not None:
        _check_dtype(f'zeros of "{name}"', zeros, (INTEGERS[name],))
    if order is not None:
        _check_dtype("order", order, (torch.int32,))
    if bias is not None:
        _check_dtype("bias", bias, FLOATS)
    if x.dim() == 0 or weight.dim() != 2:
        raise QuantizationError(
            "x of [..., K] and a weight of two dimensions",
            f"{x.dim()} and {weight.dim()} dimensions",
            "Reshape them.",
        )
    depth, outs = x.shape[-1], weight.shape[0]
    groups = -(-depth // scheme.group_size)
    _check_shape("weight", weight, (outs, -(-depth // 2) if name in NIBBLES else depth))
    _check_shape("scales", scales, (outs, groups))
    _check_shape("zeros", zeros, (outs, groups))
    _check_shape("order", order, (depth,))
    _check_shape("bias", bias, (outs,))


def _check_scheme(scheme: Scheme, has_zeros: bool) -> None:
    name, size, compute = scheme
    if name not in STORED:
        raise QuantizationError(
            f"a weight dtype of {', '.join(STORED)}", repr(name), "Give one of these."
        )
    if compute not in COMPUTES:
        raise QuantizationError(
            f"a compute dtype of {', '.join(COMPUTES)}", repr(compute), "Give one of these."
        )
    if size <= 0:
        raise QuantizationError(
            "a positive group size", str(size), "For one scale a row give K itself."
        )
    if name not in INTEGERS and compute == "int8":
        raise QuantizationError(
            'weights in int8 or int4 for compute "int8"',
            f'"{name}"',
            'Use compute "bfloat16", "float16" or "float32".',
        )
    if name not in INTEGERS and has_zeros:
        raise QuantizationError(
            f'no zero points for "{name}", whose values are floats', "some", "Give None as zeros."
        )


def _check_dtype(what: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise ArgumentError(f"{what} in {names}", str(tensor.dtype), "Cast it.")


def _check_shape(what: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise QuantizationError(
            f"{what} of shape {list(shape)}",
            str(list(tensor.shape)),
            "It follows from the shapes of x and of the weight, and from the group size.",
        )

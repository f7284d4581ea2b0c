"""`ipex::conv`: a convolution, transposed or not, together with its epilogue."""

import torch
from torch import Tensor

from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import op
from ipex_inductor.ops.common.epilogue import UNARY

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@op("conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    binary: str,
    unary: str,
    scalars: list[float],
    packed: str,
) -> Tensor:
    """Return `unary(binary(convolution(x, weight, bias, ...), other), *scalars)`.

    A plain weight runs the reference, which torch.convolution defines. The strides of a weight in
    oneDNN's layout do not tell the memory format that eager would give the result, so `packed`
    names it.

    Args:
        x: [B, C, *size].
        weight: [O, C / groups, *window]; [C, O / groups, *window] if transposed. In oneDNN's layout
            [O, C / groups, *window] in both cases, over two or three dimensions.
        bias: [O].
        other: as the result.
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        transposed: True for a transposed convolution.
        output_padding: of each dimension.
        groups: number of groups.
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
        packed: "" for a plain weight; "contiguous" or "channels_last" for a weight in oneDNN's
            layout.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    if not packed:
        return reference(x, weight, bias, other, *window, binary, unary, scalars)
    fused = UNARY[unary]
    if transposed:
        result: Tensor = torch.ops.mkldnn._convolution_transpose_pointwise(
            *(x, weight, bias, padding, output_padding, stride, dilation, groups),
            *(fused.onednn_name, scalars, fused.algorithm),
        )
        return _with_format(result, packed)
    op = torch.ops.mkldnn._convolution_pointwise
    conv_args = (weight, bias, padding, stride, dilation, groups)
    if other is None:
        result = op.default(x, *conv_args, fused.onednn_name, scalars, fused.algorithm)
    else:
        last = None if unary == "none" else fused.onednn_name
        result = op.binary(x, other, *conv_args, binary, 1.0, last, scalars, fused.algorithm)
    return _with_format(result, packed)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    binary: str,
    unary: str,
    scalars: list[float],
) -> Tensor:
    """Return what `ipex::conv` computes, with torch's own ops.

    Args:
        x: [B, C, *size].
        weight: plain weight.
        bias: [O].
        other: as the result.
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
        transposed: True for a transposed convolution.
        output_padding: of each dimension.
        groups: number of groups.
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    product = torch.convolution(x, weight, bias, *window)
    return epilogue.apply(product, other, binary, unary, scalars)


@conv.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    binary: str,
    unary: str,
    scalars: list[float],
    packed: str,
) -> Tensor:
    if not packed:
        window = (stride, padding, dilation, transposed, output_padding, groups)
        return reference(x, weight, bias, other, *window, binary, unary, scalars)
    shape = [x.shape[0], weight.shape[0]]
    for axis, size in enumerate(x.shape[2:]):
        reach = dilation[axis] * (weight.shape[axis + 2] - 1) + 1
        shape.append(
            (size - 1) * stride[axis] - 2 * padding[axis] + reach + output_padding[axis]
            if transposed
            else (size + 2 * padding[axis] - reach) // stride[axis] + 1
        )
    return _with_format(x.new_empty(shape), packed)


def _with_format(result: Tensor, packed: str) -> Tensor:
    last = packed == "channels_last"
    format = CHANNELS_LAST[result.dim()] if last else torch.contiguous_format
    return result.contiguous(memory_format=format)

"""`ipex::conv`: a convolution, transposed or not, together with its epilogue."""

import torch
from torch import Tensor

from ipex_inductor.ops import epilogue
from ipex_inductor.ops.defining import op
from ipex_inductor.ops.epilogue import UNARY

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
    """`unary(binary(convolution(x, weight, bias, ...), other), *scalars)`: see `ops/epilogue.py`.

    x [B, C, *size], weight [O, C / groups, *window] ([C, O / groups, *window] if transposed), bias
    [O], other as the result. `packed` is "" for a plain weight: the reference, torch.convolution
    defines the product. Otherwise the weight is in oneDNN's layout, [O, C / groups, *window] in
    both cases, over two or three dimensions; its strides say nothing of the format eager would
    give the result, so `packed` names that: "contiguous" or "channels_last".
    """
    window = (stride, padding, dilation, transposed, output_padding, groups)
    if not packed:
        return reference(x, weight, bias, other, *window, binary, unary, scalars)
    word = UNARY[unary]
    if transposed:
        result: Tensor = torch.ops.mkldnn._convolution_transpose_pointwise(
            *(x, weight, bias, padding, output_padding, stride, dilation, groups),
            *(word.word, scalars, word.algorithm),
        )
        return _formatted(result, packed)
    op = torch.ops.mkldnn._convolution_pointwise
    known = (weight, bias, padding, stride, dilation, groups)
    if other is None:
        result = op.default(x, *known, word.word, scalars, word.algorithm)
    else:
        last = None if unary == "none" else word.word
        result = op.binary(x, other, *known, binary, 1.0, last, scalars, word.algorithm)
    return _formatted(result, packed)


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
    """What `ipex::conv` computes, in torch's own ops."""
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
    return _formatted(x.new_empty(shape), packed)


def _formatted(result: Tensor, packed: str) -> Tensor:
    last = packed == "channels_last"
    format = CHANNELS_LAST[result.dim()] if last else torch.contiguous_format
    return result.contiguous(memory_format=format)

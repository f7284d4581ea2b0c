"""`ipex::conv`: a convolution, transposed or not, together with its epilogue."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.ops.common.epilogue import UNARY

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class ConvArgs(NamedTuple):
    """Arguments of `ipex::conv` in the order of its schema: tensors, or nodes for them."""

    x: Any
    weight: Any
    bias: Any
    other: Any
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int
    binary: str
    unary: str
    scalars: Sequence[float]
    packed: str = ""

    @classmethod
    def of(cls, node: torch.fx.Node) -> Self:
        """Return the arguments of a node that calls the op."""
        args: Any = node.args
        return cls(*args)

    def window(self) -> tuple[Any, ...]:
        """Return the arguments of `torch.convolution` behind its tensors."""
        window = (self.stride, self.padding, self.dilation)
        return (*window, self.transposed, self.output_padding, self.groups)

    def epilogue(self) -> tuple[str, str, Sequence[float]]:
        """Return the binary op, the unary op, and its scalars."""
        return self.binary, self.unary, self.scalars


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


def reference(*args: Any) -> Tensor:
    """Return what `ipex::conv` computes on a plain weight, with torch's own ops.

    Args:
        args: arguments of `ipex::conv`, as in `ConvArgs`; `packed` may be left out.
    """
    call = ConvArgs(*args)
    product = torch.convolution(call.x, call.weight, call.bias, *call.window())
    return epilogue.apply(product, call.other, *call.epilogue())


@fake(conv)
def _(call: Arguments) -> object:
    args = ConvArgs(**vars(call))
    if not call.packed:
        return reference(*args)
    shape = [call.x.shape[0], call.weight.shape[0]]
    axes = zip(args.x.shape[2:], args.weight.shape[2:], *args.window()[:3], strict=False)
    for axis, (size, taps, stride, padding, dilation) in enumerate(axes):
        reach = dilation * (taps - 1) + 1
        shape.append(
            (size - 1) * stride - 2 * padding + reach + call.output_padding[axis]
            if call.transposed
            else (size + 2 * padding - reach) // stride + 1
        )
    return _with_format(call.x.new_empty(shape), call.packed)


def _with_format(result: Tensor, packed: str) -> Tensor:
    last = packed == "channels_last"
    format = CHANNELS_LAST[result.dim()] if last else torch.contiguous_format
    return result.contiguous(memory_format=format)

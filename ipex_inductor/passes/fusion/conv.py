"""Rules of convolutions: convolution, transposed or not, x epilogue; and a pad before it."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.passes.engine.packable import find_symbols, why_not_conv
from ipex_inductor.passes.engine.rule import Constant, Form, Rule
from ipex_inductor.passes.fusion import library
from ipex_inductor.passes.fusion.epilogue import Producer, family

# Window parameters whose numbers occur nowhere else; the 2D example matches any rank.
WINDOW = {"stride": [2, 3], "padding": [5, 7], "dilation": [11, 13], "groups": 17}


def producer(transposed: bool) -> Producer:
    """Return convolution, transposed or not, as the producer of an epilogue family."""
    name = "conv_transpose" if transposed else "conv"

    def product(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        output_padding: list[int] | None = None,
    ) -> Tensor:
        extra = output_padding or [0] * len(stride)
        return torch.convolution(
            x, weight, bias, stride, padding, dilation, transposed, extra, groups
        )

    def build_arguments(
        *epilogue: Any,
        x: Any,
        weight: Any,
        bias: Any,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        output_padding: list[int] | None = None,
    ) -> tuple[Any, ...]:
        addend, *rest = epilogue
        window = (stride, padding, dilation, transposed, output_padding or [0] * len(stride))
        return x, weight, bias, addend, *window, groups, *rest, ""

    def when(values: Mapping[str, Any]) -> str | None:
        if values["x"].device.type in library.GPUS:
            return library.why_not(name, values)
        x, weight, bias, addend = (values.get(n) for n in ("x", "weight", "bias", "other"))
        names = ("stride", "padding", "dilation", "output_padding", "groups")
        window = {name: values.get(name) for name in names}
        return why_not_conv(x, weight, bias, addend, transposed=transposed, **window)

    return Producer(
        name=name,
        product=product,
        op=torch.ops.ipex.conv.default,
        fused=build_arguments,
        forms=tuple(
            Form(frozenset({"convolution"}), functools.partial(_example, transposed, bias))
            for bias in (True, False)
        ),
        when=when,
    )


def _example(transposed: bool, bias: bool) -> dict[str, Any]:
    """Return x [1, 34, 64, 64] and weight [68, 2, 3, 3], or [34, 4, 3, 3] if transposed."""
    window: dict[str, Any] = dict(WINDOW)
    if transposed:
        window["output_padding"] = [1, 4]
    return {
        "x": torch.empty(1, 34, 64, 64),
        "weight": torch.empty(34, 4, 3, 3) if transposed else torch.empty(68, 2, 3, 3),
        "bias": torch.empty(68) if bias else None,
        **{name: Constant(value) for name, value in window.items()},
    }


def _pad_then_convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pad: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    extra = [0] * len(stride)
    wide = F.pad(x, pad)
    return torch.convolution(wide, weight, bias, stride, padding, dilation, False, extra, groups)


def _pad_in_window(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pad: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    extra = [0] * len(stride)
    sides = [*extra, *pad[-2::-2]][-len(extra) :]  # `pad` begins with the last dimension
    # The padding "valid" comes as one zero.
    own_padding = padding * len(extra) if len(padding) == 1 else padding
    window = [both + more for both, more in zip(own_padding, sides, strict=True)]
    return torch.convolution(x, weight, bias, stride, window, dilation, False, extra, groups)


def _is_window(values: Mapping[str, Any]) -> str | None:
    pad, dims = values["pad"], len(values["stride"])
    if reason := find_symbols(pad=pad, padding=values["padding"]):
        return reason
    if values["x"].dim() != dims + 2:
        return "the input has no batch dimension"
    if len(pad) > 2 * dims:
        return "batch or channels are padded"
    if any(left != right for left, right in zip(pad[::2], pad[1::2], strict=True)):
        return f"the padding {pad} is not the same on both sides"
    return "the padding crops" if min(pad) < 0 else None


def _padded_example(bias: bool) -> dict[str, Any]:
    example = _example(transposed=False, bias=bias)
    tensors = {name: example.pop(name) for name in ("x", "weight", "bias")}
    return {**tensors, "pad": Constant([1, 1, 19, 19]), **example}


PAD = Rule(
    equation="pad + conv => conv",
    pattern=_pad_then_convolve,
    replacement=_pad_in_window,
    forms=tuple(
        Form(frozenset({"convolution"}), functools.partial(_padded_example, bias))
        for bias in (True, False)
    ),
    anchor="constant_pad_nd",
    when=_is_window,
)

# The pad comes first: it leaves a convolution like any other.
RULES = (PAD, *family(producer(False)), *family(producer(True)))

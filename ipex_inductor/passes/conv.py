"""Rules of the convolution family: convolution, transposed or not, x epilogue."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_inductor.passes.epilogue import Producer, family
from ipex_inductor.passes.packing import why_not_conv
from ipex_inductor.passes.rule import Constant, Form

# A window of numbers met nowhere else; over two dimensions, and it matches any number of them.
WINDOW = {"stride": [2, 3], "padding": [5, 7], "dilation": [11, 13], "groups": 17}


def _producer(transposed: bool) -> Producer:
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

    def fused(output_padding: list[int] | None = None, **arguments: Any) -> Tensor:
        extra = output_padding or [0] * len(arguments["stride"])
        words = {"transposed": transposed, "output_padding": extra, "packed": ""}
        result: Tensor = torch.ops.ipex.conv(**arguments, **words)
        return result

    def when(values: Mapping[str, Any]) -> str | None:
        tensors = (values["weight"], values["bias"], values.get("other"))
        return why_not_conv(values["x"], *tensors, transposed, values["groups"])

    return Producer(
        name="conv_transpose" if transposed else "conv",
        product=product,
        fused=fused,
        forms=tuple(
            Form(frozenset({"convolution"}), functools.partial(_example, transposed, bias))
            for bias in (True, False)
        ),
        when=when,
    )


def _example(transposed: bool, bias: bool) -> dict[str, Any]:
    """x [1, 34, 64, 64] and weight [68, 2, 3, 3], or [34, 4, 3, 3] if transposed."""
    window: dict[str, Any] = dict(WINDOW)
    if transposed:
        window["output_padding"] = [1, 4]
    return {
        "x": torch.empty(1, 34, 64, 64),
        "weight": torch.empty(34, 4, 3, 3) if transposed else torch.empty(68, 2, 3, 3),
        "bias": torch.empty(68) if bias else None,
        **{name: Constant(value) for name, value in window.items()},
    }


RULES = (*family(_producer(False)), *family(_producer(True)))

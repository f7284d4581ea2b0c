"""Products between quantized values, and which of them a kernel on integers serves."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.ops.quant.int8_operands import INTEGERS, is_depthwise
from ipex_inductor.passes.engine.packable import find_symbols
from ipex_inductor.passes.engine.rule import equal_shapes
from ipex_inductor.passes.quant.values import Quantized, is_zero
from ipex_inductor.templates.cpu import int8
from ipex_inductor.templates.triton import int8_conv

Node = torch.fx.Node

EXACT_DEPTH = 1 << 16  # K from which sums of products of 8 bits may overflow 32 bits
LONGEST_ROW = 128  # taps of a depthwise convolution that are summed up in floats
FLOATS = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}


@dataclass(frozen=True)
class Product:
    """A convolution or linear layer of the graph with its epilogue.

    Args:
        x: the activation.
        weight: the weight [O, K] or [O, C / groups, *window].
        bias: [O], or None.
        other: the addend, or None.
        window: stride, padding, dilation and groups of a convolution; None for a linear layer.
        binary: name in `ops/common/epilogue.py`.
        unary: name in `ops/common/epilogue.py`.
        scalars: arguments of the unary.
    """

    x: Any
    weight: Any
    bias: Any = None
    other: Any = None
    window: tuple[Any, ...] | None = None
    binary: str = "none"
    unary: str = "none"
    scalars: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """Return the name as rules spell it: `conv+add+relu`."""
        parts = ["linear" if self.window is None else "conv", self.binary, self.unary]
        return "+".join(part for part in parts if part != "none")


class Refused(Exception):
    """A product that stays in floating point; the text says why."""


def check_product(node: Node, product: Product, x: Quantized, weight: Quantized) -> None:
    """Raise `Refused` if no kernel of the device is for a product.

    Args:
        node: the node of the product.
        product: its arguments.
        x: the integers of the activation.
        weight: the integers of the weight.
    """
    value, weight_value = _value(x.integers), _value(weight.integers)
    kind = value.device.type
    if kind not in CHECKS:
        raise Refused(f"no int8 kernel for {kind} yet: it is computed as a float")
    if value.dtype not in INTEGERS or weight_value.dtype != torch.int8:
        dtypes = f"{value.dtype} and {weight_value.dtype}"
        raise Refused(f"kernels take 8-bit activations and int8 weights, not {dtypes}")
    if x.by_row and (product.window is not None or value.dtype != torch.int8):
        raise Refused("scales of rows are for linear layers on int8")
    if x.by_row and not is_zero(x.zero_point):
        raise Refused("the zero points of rows are not known to be zero")
    if x.axis is not None or weight.axis not in (None, 0):
        raise Refused("the weight has no scale of each output channel")
    has_zeros = weight.zero_point is not None
    if x.by_row and has_zeros:
        raise Refused("the zero points of the weight are not known to be zero")
    if not all(isinstance(size, int) for size in weight_value.shape):
        raise Refused("the size of the weight varies")
    # Sums of a row are multiplied by zero points, and need another bit.
    if math.prod(weight_value.shape[1:]) >= EXACT_DEPTH >> has_zeros:
        raise Refused("sums of so many products may overflow 32 bits")
    if _value(node).dtype not in FLOATS[kind]:
        raise Refused(f"kernels have no results in {_value(node).dtype}")
    if find_symbols(scalars=list(product.scalars)):
        raise Refused("a number of the activation varies with sizes")
    if product.window is not None:
        stride, padding, dilation, groups = product.window
        window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        if reason := find_symbols(**window):
            raise Refused(reason)
    CHECKS[kind](product, value, weight)


def _check_on_cpu(product: Product, x: torch.Tensor, weight: Quantized) -> None:
    weight_value = _value(weight.integers)
    if product.unary not in int8.UNARY or product.binary not in int8.BINARY:
        raise Refused(f"kernels have no {product.name}")
    if product.window is None:
        return
    is_alone = is_depthwise(weight_value.shape, product.window[-1])
    if is_alone and weight_value.shape[-1] > LONGEST_ROW:
        raise Refused(f"kernels of depthwise convolutions have rows of {LONGEST_ROW} taps at most")
    if x.dim() != weight_value.dim() or x.dim() not in (4, 5):
        raise Refused("kernels are for batches over two or three dimensions")


def _check_on_gpu(product: Product, x: torch.Tensor, weight: Quantized) -> None:
    if x.dtype != torch.int8:
        raise Refused("the uint8 activation is not quantized in this graph, and kernels take int8")
    if weight.zero_point is not None:
        raise Refused("kernels of GPUs are for weights whose zero points are known to be zero")
    if find_symbols(sizes=list(x.shape)):
        raise Refused("kernels of GPUs are for static sizes")
    if not x.numel():
        raise Refused("the activation is empty")
    if product.window is None:
        return
    _, padding, _, groups = product.window
    shape = _value(weight.integers).shape
    if x.dim() != 4 or len(shape) != 4:
        raise Refused("kernels of GPUs are for batches over two dimensions")
    if groups != 1:
        raise Refused("kernels of GPUs have no groups")
    if len(padding) != 2 and padding[:2] != padding[2:]:
        raise Refused("kernels of GPUs pad both sides alike")
    if math.prod(shape[2:]) > int8_conv.MOST_PLACES:
        raise Refused(f"kernels of GPUs have {int8_conv.MOST_PLACES} taps at most")


# Checks of a product, its activation and its weight, by the kind of device.
CHECKS = {"cpu": _check_on_cpu, "cuda": _check_on_gpu}


def check_addend(node: Node, addend: Any) -> None:
    """Raise `Refused` unless the kernel reads the addend as it is: of the result's shape."""
    if addend is None:
        return
    if not isinstance(addend, Node):
        raise Refused("the addend is a number")
    value = _value(addend)
    if value.dtype not in int8.NUMBERS and value.dtype not in FLOATS[value.device.type]:
        raise Refused(f"kernels take no addend in {value.dtype}")
    if not equal_shapes(value, _value(node)):
        raise Refused("the addend has another shape than the result")


def _value(node: Any) -> Any:
    return node.meta["val"]

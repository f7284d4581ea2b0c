"""oneDNN's layout for every weight of a linear layer or convolution that is a parameter.

Runs on the inference graph that goes to the inner compiler: packing is work on weights alone, so
the prologue takes it out of the graph. What cannot be packed is written in torch's ops again.
"""

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch

from ipex_inductor.ops import conv, linear
from ipex_inductor.passes.whole_ops import inline
from ipex_inductor.report import GraphReport

Node = torch.fx.Node
aten, ipex, mkldnn = torch.ops.aten, torch.ops.ipex, torch.ops.mkldnn

# Their results are opaque: they may only ever run in the prologue.
PACKERS = (mkldnn._reorder_linear_weight.default, mkldnn._reorder_convolution_weight.default)


@dataclass(frozen=True)
class Product:
    """A node seen as `ipex` op: the arguments it would have, and its weight before packing."""

    op: Any
    weight: Node
    args: Callable[[Node], tuple[Any, ...]]  # of the packed weight
    pack: Callable[[torch.fx.Graph], Node]


def pack_weights(graph: torch.fx.Graph, weights: Container[Node], report: GraphReport) -> None:
    """Give every product whose weight is among `weights` that weight packed by oneDNN."""
    for node in list(graph.nodes):
        product = _as_product(node)
        if product is not None and product.weight in weights and _is_static(product.weight):
            with graph.inserting_before(node):
                packed = product.pack(graph)
                # What torch reports as the strides of oneDNN's opaque layout.
                value = product.weight.meta["val"]
                strides = (1, *[0] * (value.dim() - 1))
                packed.meta["val"] = value.new_empty_strided(value.shape, strides)
                call = graph.call_function(product.op, product.args(packed))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)
        elif node.target in REFERENCES:
            report.add("missed", str(node.target), "the weight is not a parameter: unfused again")
            inline(graph, node, REFERENCES[node.target])


@functools.cache
def onednn_dtypes() -> frozenset[torch.dtype]:
    """The dtypes in which this CPU's oneDNN has products (fp64 has none)."""
    supported = {torch.float32}
    if mkldnn._is_mkldnn_bf16_supported():
        supported.add(torch.bfloat16)
    if mkldnn._is_mkldnn_fp16_supported():
        supported.add(torch.float16)
    return frozenset(supported)


def why_not(*values: Any) -> str | None:
    """Why oneDNN has no kernel for these tensors (x, weight, bias ...), None when it has."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    first = tensors[0]
    backend: Any = torch.backends.mkldnn
    if not (backend.is_available() and backend.enabled):
        return "oneDNN is switched off (torch.backends.mkldnn)"
    if first.device.type != "cpu":
        return f"no fused kernel for {first.device.type} yet: Inductor's own is kept"
    if first.dtype not in onednn_dtypes() or any(v.dtype != first.dtype for v in tensors):
        return f"oneDNN has no kernel for {', '.join(str(v.dtype) for v in tensors)} on this CPU"
    if any(isinstance(size, int) and size == 0 for v in tensors for size in v.shape):
        return "a size is zero"
    return None


def why_not_linear(x: Any, weight: Any, bias: Any) -> str | None:
    """Why oneDNN has no linear kernel for these tensors, None when it has."""
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        return f"an addend of shape {tuple(bias.shape)} is no bias of {weight.shape[0]} elements"
    return why_not(x, weight, bias)


def _as_product(node: Node) -> Product | None:
    read = READERS.get(node.target) if node.op == "call_function" else None
    return read(node) if read else None


def _is_static(node: Node) -> bool:
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _fits(*nodes: Any) -> bool:
    return why_not(*(n.meta["val"] for n in nodes if isinstance(n, Node))) is None


def _addmm(node: Node) -> Product | None:
    if node.kwargs:  # beta, alpha
        return None
    bias, x, transposed = node.args
    return _transposed_product(x, transposed, bias)


def _mm(node: Node) -> Product | None:
    x, transposed = node.args
    return _transposed_product(x, transposed, None)


def _transposed_product(x: Any, transposed: Any, bias: Any) -> Product | None:
    if transposed.target is not aten.permute.default or list(transposed.args[1]) != [1, 0]:
        return None
    return _linear_product(x, transposed.args[0], bias, "none")


def _ipex_linear(node: Node) -> Product | None:
    x, weight, bias, unary, _ = node.args
    return _linear_product(x, weight, bias, unary)


def _linear_product(x: Any, weight: Any, bias: Any, unary: Any) -> Product | None:
    if why_not_linear(*(n and n.meta["val"] for n in (x, weight, bias))):
        return None
    rows = _known_product(x.meta["val"].shape[:-1])
    return Product(
        ipex.linear.default,
        weight,
        lambda packed: (x, packed, bias, unary, True),
        lambda g: g.call_function(PACKERS[0], (weight, rows)),
    )


def _convolution(node: Node) -> Product | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed or x.meta["val"].dim() != 4:  # type: ignore[union-attr]
        return None
    return _conv_product(node, x, weight, bias, None, stride, padding, dilation, groups, "none")


def _ipex_conv(node: Node) -> Product | None:
    *args, _ = node.args
    return _conv_product(node, *args)


def _conv_product(
    node: Node, x: Any, weight: Any, bias: Any, other: Any, stride: Any, padding: Any, *rest: Any
) -> Product | None:
    dilation, groups, unary = rest
    if not _fits(x, weight, bias, other):
        return None
    shape = list(x.meta["val"].shape)
    known = shape if all(isinstance(size, int) for size in shape) else None
    window = (padding, stride, dilation, groups)
    last = not node.meta["val"].is_contiguous()  # eager gives one or the other
    result = "channels_last" if last else "contiguous"
    return Product(
        ipex.conv.default,
        weight,
        lambda p: (x, p, bias, other, stride, padding, dilation, groups, unary, result),
        lambda g: g.call_function(PACKERS[1], (weight, *window, known)),
    )


def _known_product(sizes: Any) -> int | None:
    """The product of sizes that are all known, None otherwise: oneDNN's blocking depends on it."""
    product = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        product *= size
    return product


READERS: dict[Any, Callable[[Node], Product | None]] = {
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.convolution.default: _convolution,
    ipex.linear.default: _ipex_linear,
    ipex.conv.default: _ipex_conv,
}

# Our ops as torch's, for those whose weight is not a parameter.
REFERENCES: dict[Any, Callable[..., torch.Tensor]] = {
    ipex.linear.default: lambda *args: linear.reference(*args[:-1]),
    ipex.conv.default: lambda *args: conv.reference(*args[:-1]),
}

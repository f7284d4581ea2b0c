"""oneDNN's layout for every weight of a linear layer or convolution that is a parameter.

Runs on the inference graph that goes to the inner compiler: packing is work on weights alone, so
the prologue takes it out of the graph. What cannot be packed is written in torch's ops again, and
what oneDNN cannot fuse behind a product stays an op of torch's behind it.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.decisions import GraphReport
from ipex_inductor.ops import conv, epilogue, linear
from ipex_inductor.ops.epilogue import UNARY
from ipex_inductor.passes.whole_ops import inline
from ipex_inductor.target import architecture
from ipex_inductor.templates import kept

Node = torch.fx.Node
aten, ipex, mkldnn = torch.ops.aten, torch.ops.ipex, torch.ops.mkldnn

# Their results are for one reader, most of them opaque: they may only ever run in the prologue.
PACKERS = (
    mkldnn._reorder_linear_weight.default,
    mkldnn._reorder_convolution_weight.default,
    mkldnn._reorder_convolution_transpose_weight.default,
    ipex.blocks.default,
    ipex.winograd_weight.default,
    kept.KEPT_WEIGHT,
)
ARRANGED = {
    ipex.blocked.default: "by our kernel, in blocks",
    ipex.winograd.default: "by our kernel, Winograd's way",
    kept.KEPT_CONV: "by oneDNN's primitives, kept",
}

_besides: ContextVar[frozenset[torch.dtype]] = ContextVar("besides", default=frozenset())


@dataclass(frozen=True)
class Product:
    """A node seen as `ipex` op: the arguments it would have, and its weight before packing."""

    op: Any
    weight: Node
    shape: tuple[int, ...]  # of the packed weight
    args: Callable[[Node], tuple[Any, ...]]  # of the packed weight
    pack: Callable[[torch.fx.Graph], Node]
    strides: tuple[int, ...] = ()  # of the packed weight; none of oneDNN's opaque layout
    dtype: torch.dtype | None = None  # of the packed weight, if it is another


def transpose_weights(graph: torch.fx.Graph, weights: Container[Node]) -> None:
    """Let every matrix product on one of `weights` take it as a linear layer does: transposed.

    `x @ w` becomes `x @ transpose(transpose(w))`: the inner one is work on weights alone, which the
    prologue does when it packs, and what matches `linear` matches this too.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (aten.addmm.default, aten.mm.default):
            continue
        x, weight = node.args[-2:]
        if weight not in weights or is_transpose(weight) or why_not(_value(x), _value(weight)):
            continue
        with graph.inserting_before(node):
            for _ in range(2):
                value = weight.meta["val"].t()
                weight = graph.call_function(aten.permute.default, (weight, [1, 0]))
                weight.meta["val"] = value
        node.args = (*node.args[:-1], weight)


def fit_to_kernels(graph: torch.fx.Graph, weights: Container[Node], report: GraphReport) -> None:
    """Rewrite every product on one of `weights` that oneDNN has in another form only.

    Of an epilogue that oneDNN does not have, what it does have stays with the product, and the rest
    follows in torch's ops. A convolution over a line becomes one over a plane of height one.
    """
    transpose_weights(graph, weights)
    for node, _ in packable(graph, weights):
        split = _split_epilogue(node)
        if split is not None:
            inline(graph, node, split)
            report.add("choice", name_of(node), "oneDNN's product, then Inductor's own kernel")
    for node, product in packable(graph, weights):
        if product.op is ipex.conv.default and len(product.shape) == 3:
            inline(graph, node, functools.partial(_over_a_plane, node.target))


def pack_weights(
    graph: torch.fx.Graph,
    weights: Container[Node],
    report: GraphReport,
    arrange: Callable[[Product], Product | None] | None = None,
) -> None:
    """Give every product whose weight is among `weights` that weight packed by oneDNN.

    Or as another product has it that `arrange` makes of oneDNN's.
    """
    arranged: Counter[Any] = Counter()
    for node, product in packable(graph, weights):
        other = arrange(product) if arrange else None
        if other is not None:
            arranged[other.op] += 1
        elif product.weight.meta["val"].dtype not in onednn_dtypes():
            continue
        product = other or product
        with graph.inserting_before(node):
            packed = product.pack(graph)
            # What torch reports as the strides of oneDNN's opaque layout.
            strides = product.strides or (1, *[0] * (len(product.shape) - 1))
            packed.meta["val"] = product.weight.meta["val"].new_empty_strided(
                product.shape, strides, dtype=product.dtype
            )
            call = graph.call_function(product.op, product.args(packed))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    for op, count in arranged.items():
        report.add("choice", "products on packed weights", f"{count} {ARRANGED[op]}")
    for node in list(graph.nodes):
        if node.target in REFERENCES and not node.args[-1]:
            report.add("missed", str(node.target), "its weight is not packed: unfused again")
            inline(graph, node, REFERENCES[node.target])


def onednn_dtypes() -> frozenset[torch.dtype]:
    """The dtypes in which this CPU's oneDNN has products (fp64 has none)."""
    return _onednn_dtypes(architecture())


@functools.cache
def _onednn_dtypes(_: str) -> frozenset[torch.dtype]:
    supported = {torch.float32}
    if mkldnn._is_mkldnn_bf16_supported():
        supported.add(torch.bfloat16)
    if mkldnn._is_mkldnn_fp16_supported():
        supported.add(torch.float16)
    return frozenset(supported)


@contextmanager
def also_in(dtypes: frozenset[torch.dtype]) -> Iterator[None]:
    """Inside, products in these are as good as oneDNN's: other kernels were asked for."""
    token = _besides.set(dtypes)
    try:
        yield
    finally:
        _besides.reset(token)


def why_not(*values: Any) -> str | None:
    """Why oneDNN has no kernel for these tensors (x, weight, bias ...), None when it has."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    first = tensors[0]
    backend: Any = torch.backends.mkldnn
    if not (backend.is_available() and backend.enabled):
        return "oneDNN is switched off (torch.backends.mkldnn)"
    if first.device.type != "cpu":
        return f"no fused kernel for {first.device.type} yet: Inductor's own is kept"
    known = onednn_dtypes() | _besides.get()
    if first.dtype not in known or any(v.dtype != first.dtype for v in tensors):
        return f"oneDNN has no kernel for {', '.join(str(v.dtype) for v in tensors)} on this CPU"
    if any(isinstance(size, int) and size == 0 for v in tensors for size in v.shape):
        return "a size is zero"
    return None


def why_not_linear(x: Any, weight: Any, bias: Any, other: Any = None) -> str | None:
    """Why oneDNN has no linear kernel for these tensors, None when it has."""
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        return f"an addend of shape {tuple(bias.shape)} is no bias of {weight.shape[0]} elements"
    return why_not(x, weight, bias, other)


def why_not_conv(
    x: Any,
    weight: Any,
    bias: Any,
    other: Any,
    stride: Any,
    transposed: Any,
    output_padding: Any,
    groups: Any,
) -> str | None:
    """Why oneDNN has no convolution kernel for these arguments, None when it has."""
    if x.dim() != weight.dim():
        return "the input has no batch dimension"
    if transposed and x.dim() == 3:
        return "oneDNN's transposed convolution is over two or three dimensions"
    if transposed and groups > 1 and weight.shape[1] == 1:
        return "oneDNN has no depthwise transposed convolution"
    if transposed and any(map(operator.ge, output_padding, stride)):
        return "oneDNN wants an output padding below the stride"
    return why_not(x, weight, bias, other)


def is_transpose(node: Node) -> bool:
    """Whether `node` is the transpose of a matrix."""
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


def packable(graph: torch.fx.Graph, weights: Container[Node]) -> Iterator[tuple[Node, Product]]:
    """The products whose weight is among `weights`, and which oneDNN has."""
    for node in list(graph.nodes):
        read = READERS.get(node.target) if node.op == "call_function" else None
        product = read(node) if read else None
        if product is not None and product.weight in weights and _is_static(product.weight):
            yield node, product


def _is_static(node: Node) -> bool:
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, Node) else node


def _fuses(node: Node, binary: Any, unary: Any) -> bool:
    """Whether one call of oneDNN has this behind the product `node`, which is an `ipex` op.

    A grouped convolution with an addend is two calls inside torch, and fails in bf16 with a relu.
    """
    if unary != "none" and not UNARY[unary].word:
        return False
    if node.target is ipex.linear.default:
        return "none" in (binary, unary)
    transposed, groups = node.args[7], node.args[9]
    if transposed or groups != 1 or not (compat.adds_to_one_pixel() or _has_pixels(node)):
        return bool(binary == "none")
    return binary == "none" or unary in ("none", "relu")


def _has_pixels(node: Node) -> bool:
    """Whether the result is known to be larger than one pixel."""
    return any(isinstance(size, int) and size > 1 for size in node.meta["val"].shape[2:])


def _split_epilogue(node: Node) -> Callable[..., Tensor] | None:
    """The op of `node` as what oneDNN has of it and torch's ops behind; None if it has all."""
    if node.target not in REFERENCES:
        return None
    *_, binary, unary, _, _ = node.args
    if _fuses(node, binary, unary):
        return None
    kept = binary if _fuses(node, binary, "none") else "none"
    rest = "none" if kept == binary else binary
    op: Any = node.target

    def call(x: Tensor, weight: Tensor, bias: Tensor | None, other: Any, *more: Any) -> Tensor:
        *window, _, _, scalars, packed = more
        first, second = (None, other) if kept == "none" else (other, None)
        product = op(x, weight, bias, first, *window, kept, "none", [], packed)
        return epilogue.apply(product, second, str(rest), str(unary), scalars)

    return call


def _over_a_plane(op: Any, *args: Any) -> Tensor:
    """`op`, a convolution over a line (aten's or ours), over a plane of height one."""
    ours = op is ipex.conv.default
    x, weight, bias, *more = args
    other, stride, padding, dilation, transposed, extra, *rest = more if ours else [None, *more]
    window = ([1, *stride], [0, *padding], [1, *dilation], transposed, [0, *extra])
    wide = (other if other is None else other.unsqueeze(2),) if ours else ()
    result: Tensor = op(x.unsqueeze(2), weight.unsqueeze(2), bias, *wide, *window, *rest)
    return result.squeeze(2)


def name_of(node: Node) -> str:
    """What `node` computes, in the words of the rules: `conv+add+relu`."""
    words = [str(word) for word in node.args[-4:-2] if word != "none"]
    return "+".join([str(node.target.__name__).split(".")[0], *words])  # type: ignore[union-attr]


def _addmm(node: Node) -> Product | None:
    if node.kwargs:  # beta, alpha
        return None
    bias, x, transposed = node.args
    return _transposed_product(x, transposed, bias)


def _mm(node: Node) -> Product | None:
    x, transposed = node.args
    return _transposed_product(x, transposed, None)


NO_EPILOGUE: tuple[Any, ...] = (None, "none", "none", [])  # other, binary, unary, scalars


def _transposed_product(x: Any, transposed: Any, bias: Any) -> Product | None:
    if not is_transpose(transposed):
        return None
    return _linear_product(x, transposed.args[0], bias, *NO_EPILOGUE)


def _ipex_linear(node: Node) -> Product | None:
    *args, packed = node.args
    return None if packed else _linear_product(*args)


def _linear_product(x: Any, weight: Any, bias: Any, *words: Any) -> Product | None:
    if why_not_linear(*map(_value, (x, weight, bias, words[0]))):
        return None
    rows = _known_product(x.meta["val"].shape[:-1])
    return Product(
        ipex.linear.default,
        weight,
        tuple(weight.meta["val"].shape),
        lambda packed: (x, packed, bias, *words, True),
        lambda g: g.call_function(PACKERS[0], (weight, rows)),
    )


def _convolution(node: Node) -> Product | None:
    x, weight, bias, *window = node.args
    return _conv_product(node, x, weight, bias, window, *NO_EPILOGUE)


def _ipex_conv(node: Node) -> Product | None:
    x, weight, bias, other, *window, binary, unary, scalars, packed = node.args
    if packed:
        return None
    return _conv_product(node, x, weight, bias, window, other, binary, unary, scalars)


def _conv_product(
    node: Node, x: Any, weight: Any, bias: Any, window: Any, other: Any, *words: Any
) -> Product | None:
    stride, padding, dilation, transposed, output_padding, groups = window
    if len(padding) == 1:  # "valid" comes as one zero
        padding = list(padding) * len(stride)
    values = (_value(x), _value(weight), _value(bias), _value(other))
    if why_not_conv(*values, stride, transposed, output_padding, groups):
        return None
    sizes = list(x.meta["val"].shape)
    known = sizes if all(isinstance(size, int) for size in sizes) else None
    shape = tuple(weight.meta["val"].shape)
    if transposed:
        if known is None:
            return None  # oneDNN blocks that weight by the size of the input
        shape = (shape[1] * groups, shape[0] // groups, *shape[2:])
    last = not node.meta["val"].is_contiguous()  # eager gives one or the other
    result = "channels_last" if last else "contiguous"
    window = (stride, padding, dilation, transposed, output_padding, groups)
    geometry = (stride, dilation, groups, known)
    packer, rest = (
        (PACKERS[2], (padding, output_padding, *geometry))
        if transposed
        else (PACKERS[1], (padding, *geometry))
    )
    return Product(
        ipex.conv.default,
        weight,
        shape,
        lambda packed: (x, packed, bias, other, *window, *words, result),
        lambda g: g.call_function(packer, (weight, *rest)),
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
REFERENCES: dict[Any, Callable[..., Tensor]] = {
    ipex.linear.default: lambda *args: linear.reference(*args[:-1]),
    ipex.conv.default: lambda *args: conv.reference(*args[:-1]),
}

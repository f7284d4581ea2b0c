"""Pack the weights of linear layers and convolutions into oneDNN's layout.

The pass runs on the inference graph that goes to the inner compiler, and serves weights that are
parameters: packing is work on weights alone, so the prologue takes it out of the graph. What cannot
be packed is written in torch's ops again, and what oneDNN cannot fuse into a product stays a torch
op behind it.
"""

import functools
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.ops.common import epilogue
from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.ops.conv import conv
from ipex_inductor.ops.conv.conv import ConvArgs
from ipex_inductor.ops.gemm import linear
from ipex_inductor.ops.gemm.linear import LinearArgs
from ipex_inductor.passes.engine.packable import NO_EPILOGUE, attempt, varies
from ipex_inductor.passes.engine.packable import PACKERS as PACKERS
from ipex_inductor.passes.engine.packable import READERS as READERS
from ipex_inductor.passes.engine.packable import Product as Product
from ipex_inductor.passes.engine.packable import also_in as also_in
from ipex_inductor.passes.engine.packable import is_transpose as is_transpose
from ipex_inductor.passes.engine.packable import onednn_dtypes as onednn_dtypes
from ipex_inductor.passes.engine.packable import packable as packable
from ipex_inductor.passes.engine.packable import why_not as why_not
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline, keep_strides
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.templates.cpu import cached_primitives as kept

Node = torch.fx.Node
WhyPlain = Callable[[Product], str | None]
aten, ipex = torch.ops.aten, torch.ops.ipex

ARRANGED = {
    ipex.blocked.default: "by this package's GEMM kernel",
    ipex.winograd.default: "by this package's Winograd kernel",
    kept.KEPT_CONV: "by cached oneDNN primitives",
}


def transpose_weights(graph: torch.fx.Graph, weights: Container[Node]) -> None:
    """Rewrite every GEMM on one of `weights` to read it transposed, as a linear layer does.

    `x @ w` becomes `x @ transpose(transpose(w))`: the inner transpose is work on weights alone,
    which the prologue does when it packs, and patterns of `linear` match the result.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (aten.addmm.default, aten.mm.default):
            continue
        x, weight = node.args[-2:]
        if (
            weight not in weights
            or is_transpose(weight)
            or why_not(x.meta["val"], weight.meta["val"])
        ):
            continue
        with graph.inserting_before(node):
            for _ in range(2):
                value = weight.meta["val"].t()
                weight = graph.call_function(aten.permute.default, (weight, [1, 0]))
                weight.meta["val"] = value
        node.args = (*node.args[:-1], weight)


def fit_to_kernels(
    graph: torch.fx.Graph,
    weights: Container[Node],
    report: GraphReport,
    why_plain: WhyPlain | None = None,
) -> None:
    """Rewrite every product on one of `weights` that oneDNN has in another form only.

    Of an epilogue that oneDNN does not have, the part that it has stays with the product, and the
    rest follows in torch's ops. A convolution over a line becomes one over a plane of height one.

    Args:
        graph: The graph, changed in place.
        weights: Nodes that are weights, or computed from weights alone.
        report: Gets the decisions.
        why_plain: Returns why a product is left on its plain weight, or None.
    """
    transpose_weights(graph, weights)
    for node, _ in packable(graph, weights):
        split = _split_epilogue(node)
        if split is not None:
            inline(graph, node, split)
            report.add("choice", name_of(node), "oneDNN's product, then Inductor's own kernel")
    for node, product in packable(graph, weights):
        line = product.op is ipex.conv.default and len(product.shape) == 3
        if line and not (why_plain and attempt(node, functools.partial(why_plain, product))):
            _lay_over_a_plane(graph, node)


def pack_weights(
    graph: torch.fx.Graph,
    weights: Container[Node],
    report: GraphReport,
    arrange: Callable[[Product], Product | None] | None = None,
    why_plain: WhyPlain | None = None,
) -> None:
    """Pack the weight of every product whose weight is among `weights` for oneDNN.

    Args:
        graph: The graph, changed in place.
        weights: Nodes that are weights, or computed from weights alone.
        report: Gets the decisions.
        arrange: Returns another product to use instead of oneDNN's, or None.
        why_plain: Returns why a product is left to torch's own kernel, or None; called where
            `arrange` has no other product.
    """
    for node in graph.nodes:
        if node.target in READERS and (reason := varies(node)):
            report.add("missed", "packed weights", reason, user_line(node))
    arranged: Counter[Any] = Counter()
    left_plain: set[Node] = set()
    for node, product in packable(graph, weights):
        arranged_product = attempt(node, functools.partial(arrange, product)) if arrange else None
        if arranged_product is None and product.weight.meta["val"].dtype not in onednn_dtypes():
            continue
        if why_plain and arranged_product is None:
            reason = attempt(node, functools.partial(why_plain, product))
            if reason:
                report.add("missed", "packed weights", reason, user_line(node))
                left_plain.add(node)
                continue
        call = attempt(
            node, functools.partial(_insert_packed_call, graph, node, arranged_product or product)
        )
        if call is None:
            continue
        arranged.update([arranged_product.op] if arranged_product else [])
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        keep_strides(graph, call)
    for op, count in arranged.items():
        report.add("choice", "layers on packed weights", f"{count} {ARRANGED[op]}")
    for node in list(graph.nodes):
        if node.target in REFERENCES and not args_of(node).packed:
            if node not in left_plain:
                report.add("missed", str(node.target), "its weight is not packed: unfused again")
            inline(graph, node, REFERENCES[node.target])


def _insert_packed_call(graph: torch.fx.Graph, node: Node, product: Product) -> Node:
    """Insert a call of `product`, on its packed weight, before `node`; return it.

    No new node is left if that fails.
    """
    last = node.prev
    try:
        with graph.inserting_before(node):
            packed = product.pack(graph)
            # The strides that torch reports for oneDNN's opaque layout.
            strides = product.strides or (1, *[0] * (len(product.shape) - 1))
            packed.meta["val"] = product.weight.meta["val"].new_empty_strided(
                product.shape, strides, dtype=product.dtype
            )
            call = graph.call_function(product.op, product.args(packed))
    except Exception:
        while node.prev is not last:
            graph.erase_node(node.prev)
        raise
    call.meta = dict(node.meta)
    return call


def _fuses(node: Node, binary: Any, unary: Any) -> bool:
    """Return whether one oneDNN call fuses this epilogue into the product `node`, an `ipex` op.

    A grouped convolution with an addend is two calls inside torch, and fails in bf16 with a relu.
    """
    if unary != "none" and not UNARY[unary].onednn_name:
        return False
    if node.target is ipex.linear.default:
        return "none" in (binary, unary)
    conv_args = ConvArgs.of(node)
    several = conv_args.transposed or conv_args.groups != 1
    if several or not (compat.adds_to_one_pixel() or _has_many(node)):
        return bool(binary == "none")
    return binary == "none" or unary in ("none", "relu")


def _has_many(node: Node) -> bool:
    """Return whether the result is known to have several channels and several pixels."""
    _, channels, *image = node.meta["val"].shape
    return channels != 1 and any(isinstance(size, int) and size > 1 for size in image)


def _split_epilogue(node: Node) -> Callable[..., Tensor] | None:
    """Return `node` as a oneDNN product and torch's ops behind it; None if oneDNN fuses it all."""
    if node.target not in REFERENCES:
        return None
    binary, unary, _ = args_of(node).epilogue()
    if _fuses(node, binary, unary):
        return None
    kept = binary if _fuses(node, binary, "none") else "none"
    rest = "none" if kept == binary else binary
    op: Any = node.target

    def call(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Any, *more: Any) -> Tensor:
        *window, _, _, scalars, packed = more
        first, second = (None, addend) if kept == "none" else (addend, None)
        product = op(x, weight, bias, first, *window, kept, "none", [], packed)
        return epilogue.apply(product, second, str(rest), str(unary), scalars)

    return call


def _lay_over_a_plane(graph: torch.fx.Graph, node: Node) -> None:
    """Replace `node`, a convolution over a line, by `ipex::conv` over a plane of height one.

    The node's strides are kept; the result's format is chosen by them later. Torch's strides over a
    plane do not show them: eager's results over a line are contiguous.
    """
    x, weight, bias, *more = node.args
    plain = node.target is aten.convolution.default
    ours: Any = [None, *more, *NO_EPILOGUE[1:], ""] if plain else more
    addend, stride, padding, dilation, transposed, extra, *rest = ours

    def call(op: Any, args: Any, value: Tensor) -> Node:
        new_node = graph.call_function(op, args)
        new_node.meta = {**node.meta, "val": value}
        return new_node

    def wide(line: Any) -> Node:
        return call(aten.unsqueeze.default, (line, 2), line.meta["val"].unsqueeze(2))

    with graph.inserting_before(node):
        window = ([1, *stride], [0, *padding], [1, *dilation], transposed, [0, *extra])
        tensors = (wide(x), wide(weight), bias, None if addend is None else wide(addend))
        value = node.meta["val"].unsqueeze(2)
        plane = call(ipex.conv.default, (*tensors, *window, *rest), value)
        line = call(aten.squeeze.dim, (plane, 2), value.squeeze(2))
    node.replace_all_uses_with(line)
    graph.erase_node(node)


def args_of(node: Node) -> ConvArgs | LinearArgs:
    """Return the arguments of a call of `ipex::conv` or `ipex::linear` by name."""
    return ConvArgs.of(node) if node.target is ipex.conv.default else LinearArgs.of(node)


def name_of(node: Node) -> str:
    """Return the name of what `node` computes, as rules spell it: `conv+add+relu`."""
    epilogue = args_of(node).epilogue()[:2] if node.target in REFERENCES else ()
    parts = [part for part in epilogue if part != "none"]
    return "+".join([str(node.target.__name__).split(".")[0], *parts])  # type: ignore[union-attr]


# Our ops written in torch's ops, for products whose weight is not a parameter.
REFERENCES: dict[Any, Callable[..., Tensor]] = {
    ipex.linear.default: linear.reference,
    ipex.conv.default: conv.reference,
}

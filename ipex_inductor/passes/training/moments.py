"""Compute statistics of batch norms in training on a GPU by a kernel that reads an activation once.

    var_mean(x, [0, 2, 3]) => moments(column_moments(rows_of(x)))

The pass is for channels-last activations that are in memory anyway; an activation that Inductor
would compute on the fly is computed inside its own reduction kernel. Like `var_mean`, the call
belongs to the forward; the backward needs only a mean and a variance for each channel.
"""

from collections.abc import Container
from dataclasses import astuple

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ipex_inductor.ops.conv.geometry import rows_of
from ipex_inductor.passes.engine.rule import is_backward
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import Target, nvidia
from ipex_inductor.templates.triton.moments import FASTER, TILE, VECTOR, parts_of

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "moments"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONVERT = prims.convert_element_type.default
VIEWS = (aten.view.default, aten.reshape.default, aten.permute.default, aten.alias.default)


def rewrite(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Replace the statistics over all pixels of channels-last activations in the forward."""
    for node in graph.find_nodes(op="call_function", target=aten.var_mean.correction):
        target = nvidia(node.all_input_nodes[0].meta["val"].device)
        if target is None or is_backward(node) or not _is_batch_norm(node):
            continue
        image = _source(node.args[0])
        reason = _why_not(image, target)
        if reason is None:
            _replace(graph, node, image, target)
            counters["ipex"][NAME] += 1
        report.add("missed" if reason else "fired", NAME, reason or "", user_line(node))


def _is_batch_norm(node: Node) -> bool:
    """Return whether a `var_mean` is in fp32, of each channel, over all other dimensions."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    options = node.kwargs.get("correction", 1), node.kwargs.get("keepdim", False)
    value = node.all_input_nodes[0].meta["val"]
    whole = value.dim() > 2 and dims == [0, *range(2, value.dim())] and options == (0, True)
    return whole and value.dtype == torch.float32


def _source(x: object) -> Node:
    """Return what `x`, in fp32, was losslessly converted from, or `x`."""
    assert isinstance(x, Node)
    if x.target is CONVERT and x.meta["val"].dtype == torch.float32:
        (source, _) = x.args
        assert isinstance(source, Node)
        return source if source.meta["val"].dtype in DTYPES else x
    return x


def _why_not(image: Node, target: Target) -> str | None:
    value = image.meta["val"]
    if target.arch not in FASTER:
        return f"it was not measured on {target.arch}"
    if value.dim() != 4:
        return "it is not over a plane"
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return "its sizes vary"
    if value.dtype not in DTYPES:
        return f"it is in {value.dtype}"
    channels, count = value.shape[1], value.numel()
    if not (value.is_contiguous(memory_format=torch.channels_last) and count):
        return "its input is not channels-last"
    if count < FASTER[target.arch] or channels < TILE.BLOCK_C:
        return "for so small an image Inductor's kernels are as fast"
    if channels % VECTOR:
        return f"its channels are no multiple of {VECTOR}"
    return None if _is_written(image) else "its input is computed where it is read"


def _is_written(image: Node) -> bool:
    """Return whether an activation is in memory in any case: from a convolution or a call of ours.

    A bias is added after a convolution, by the reader of its result. What follows a template of
    ours may round to another dtype before it is written.
    """
    source = _through(image, VIEWS)
    if source.target is aten.convolution.default:
        return source.args[2] is None
    ours = getattr(_through(image, (*VIEWS, CONVERT)).target, "namespace", "")
    return ours == "ipex" or source.op == "placeholder"


def _through(node: Node, ops: Container[object]) -> Node:
    while node.target in ops:
        (node,) = node.all_input_nodes
    return node


def _replace(graph: torch.fx.Graph, node: Node, image: Node, target: Target) -> None:
    value = image.meta["val"]
    channels = value.shape[1]
    rows = value.numel() // channels
    before = node.args[0]
    parts = parts_of(rows, channels, TILE, target.multiprocessors)
    node.args, node.kwargs = (image, parts, [*astuple(TILE)]), {}
    inline(graph, node, _var_mean, origins=True)
    if isinstance(before, Node) and not before.users:
        graph.erase_node(before)


def _var_mean(image: Tensor, parts: int, tile: list[int]) -> list[Tensor]:
    rows = rows_of(image)
    partial = torch.ops.ipex.column_moments(rows, parts, tile)
    return [moment.view(1, -1, 1, 1) for moment in torch.ops.ipex.moments(partial, len(rows))]

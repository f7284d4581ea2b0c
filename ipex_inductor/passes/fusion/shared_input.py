"""Join linear layers on one input, of any widths, into one GEMM on concatenated weights.

One call then replaces several; the prologue concatenates the weights. On a CPU that pays while the
input has few rows (`benchmarks/studies/shared_input.py`). On a GPU it always pays, as
the GPU is filled better and readers take their columns in place (`benchmarks/nlp.py`).
"""

import operator
from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import inline
from ipex_inductor.passes.weights.packing import is_transpose, why_not
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "linear|linear"
OURS = ("aten", "ipex", "prims")  # namespaces of ops that read strides at run time
FEW = 16  # the most rows for which one call beats several on a CPU


def join_linears(
    graph: torch.fx.Graph, weights: Container[Node], report: GraphReport, any_rows: bool = False
) -> None:
    """Join every group of linear layers that share an input; report why others are not joined.

    Args:
        graph: The graph, changed in place.
        weights: Nodes that are weights.
        report: Gets the decisions.
        any_rows: Whether a CPU joins layers for more than `FEW` rows too: a graph for few rows
            then packs the same concatenated weights, and both read one copy.
    """
    for group in _groups(graph, weights):
        reason = _why_not(group, any_rows)
        if reason is None:
            _join(graph, group)
            counters["ipex"][NAME] += 1
        kind, facts = ("missed", reason) if reason else ("fired", f"{len(group)} layers")
        report.add(kind, NAME, facts, user_line(group[0]))


def _groups(graph: torch.fx.Graph, weights: Container[Node]) -> list[list[Node]]:
    """Return groups of GEMMs on weights and one input, all with a bias or all without."""
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (aten.addmm.default, aten.mm.default):
            continue
        *bias, x, transposed = node.args
        if node.kwargs or not is_transpose(transposed):
            continue
        parameters = (*bias, transposed.args[0])
        # A node computed from weights might come after the first layer of the group.
        if all(n in weights and n.op == "placeholder" for n in parameters):
            groups.setdefault((node.target, *_source(x)), []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def _source(x: Any) -> tuple[Any, ...]:
    """Return the tensor that a layer's input is a view of, and the view's shape.

    Each layer views its input as a matrix again, so the views differ.
    """
    shape = str(x.meta["val"].shape)  # symbols have no hash
    return (x.args[0] if x.target is aten.view.default else x), shape


def _why_not(group: Sequence[Node], any_rows: bool) -> str | None:
    rows = group[0].meta["val"].shape[0]
    for node in group:
        *bias, _, _ = node.args
        if bias and bias[0].meta["val"].shape != node.meta["val"].shape[1:]:  # type: ignore[union-attr]
            return "an addend is no bias"
    if _on_gpu(group):
        dtypes = {n.meta["val"].dtype for node in group for n in node.all_input_nodes}
        return "of several dtypes" if len(dtypes) > 1 else None
    if not isinstance(rows, int):
        return "the number of rows is not known"
    if rows > FEW and not any_rows:
        return f"{rows} rows: several calls are as fast from {FEW + 1} on"
    return why_not(*(node.meta["val"] for node in group))


def _on_gpu(group: Sequence[Node]) -> bool:
    value: Tensor = group[0].meta["val"]
    return value.device.type == "cuda"


def _join(graph: torch.fx.Graph, group: Sequence[Node]) -> None:
    """Compute the joint GEMM in place of the first layer, and split its columns."""
    # Columns of the joint result are strided: kernels on a CPU read copies faster.
    copied = tuple(not _on_gpu(group) or _counts_on_strides(node) for node in group)
    first: Any = group[0]
    biases = [node.args[0] for node in group] if len(first.args) == 3 else []
    weights = [node.args[-1].args[0] for node in group]  # type: ignore[union-attr]
    with graph.inserting_before(first):
        joint = graph.call_function(_product, (copied, first.args[-2], *weights, *biases))
        shares = [graph.call_function(operator.getitem, (joint, i)) for i in range(len(group))]
    joint.meta = {key: value for key, value in first.meta.items() if key != "val"}
    for node, share in zip(group, shares, strict=True):
        node.replace_all_uses_with(share)
        graph.erase_node(node)
    inline(graph, joint, _product)


def _counts_on_strides(node: Node) -> bool:
    """Return whether traced strides are used later: by `as_strided`, foreign ops or callers."""
    for user in node.users:
        op = user.target
        if not isinstance(op, torch._ops.OpOverload) or op.namespace not in OURS:
            return True
        if "as_strided" in str(op) or op is aten.view.dtype:
            return True
        if (op.is_view or op is aten._unsafe_view.default) and _counts_on_strides(user):
            return True
    return False


def _product(copied: Sequence[bool], x: Tensor, *weights_and_biases: Tensor) -> list[Tensor]:
    """Return the columns of each layer; copies where `copied` says so.

    Later nodes that were traced with contiguous strides need copies.
    """
    count = len(copied)
    weights, biases = weights_and_biases[:count], weights_and_biases[count:]
    joint = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    shares = torch.split(joint, [len(weight) for weight in weights], -1)
    return [s.contiguous() if is_copied else s for s, is_copied in zip(shares, copied, strict=True)]

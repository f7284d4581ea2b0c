"""Join small GPU kernels of a training graph that do equal work on many tensors into one kernel.

    convert_element_type(weight, dtype), ...    => foreach_convert([weight, ...], dtype)
    convert_element_type(gradient, dtype), ...  => foreach_convert([gradient, ...], dtype)
    add(counter, 1), ...                        => _foreach_add([counter, ...], 1)

Under autocast a step of ResNet-50 has 161 such kernels, of 1 to 3 us each, which the host takes
longer to launch. Inductor fuses elementwise ops into loops, but has no loop over tensors. Only
conversions that are separate kernels anyway are joined: between memory and library calls.
"""

from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from ipex_inductor import ops
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "foreach"
FEWEST = 4  # the fewest nodes of a kind that are joined
LARGEST = 1 << 22  # elements whose kernel takes longer than its launch (5 us on an H200)
ALIVE = 1 << 25  # the most elements of one list: gradients stay in memory until the last is ready

CONVERT = prims.convert_element_type.default
VIEWS = (aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default)
WEIGHT = {aten.convolution.default: 1, aten.convolution_backward.default: 2}  # operand numbers
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def gather(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Join nodes of one kind in `graph`, which AOT autograd traced for training."""
    changed = False
    for kind, nodes in _group_by_kind(graph).items():
        for group in _portions(nodes):
            if len(group) >= FEWEST:
                _join(graph, group, KINDS[kind[0]][1])
                counters["ipex"][NAME] += 1
                report.add("fired", NAME, f"{len(group)} {KINDS[kind[0]][2]}")
                changed = True
    if changed:
        graph.lint()


def _group_by_kind(graph: torch.fx.Graph) -> dict[tuple[Any, ...], list[Node]]:
    """Return the nodes to join by kind, device and dtypes, in the order of the graph."""
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.nodes:
        kind = next((name for name, (fits, *_) in KINDS.items() if fits(node)), None)
        if kind is not None:
            source, value = node.args[0].meta["val"], node.meta["val"]
            groups.setdefault((kind, value.device, source.dtype, value.dtype), []).append(node)
    return groups


def _portions(nodes: list[Node]) -> Iterator[list[Node]]:
    """Split `nodes` into groups of at most `ALIVE` elements."""
    group: list[Node] = []
    alive = 0
    for node in nodes:
        count = node.meta["val"].numel()
        if alive + count > ALIVE:
            yield group
            group, alive = [], 0
        group.append(node)
        alive += count
    yield group


def _is_weight(node: Node) -> bool:
    """Return whether a node is a parameter's copy in another dtype, read by library calls only."""
    return _converts(node) and _source(node).op == "placeholder" and _read_by_libraries(node)


def _is_gradient(node: Node) -> bool:
    """Return whether a node converts the result of a library call for the caller."""
    if not _converts(node) or any(user.op != "output" for user in node.users):
        return False
    source = _source(node)
    while source.target in VIEWS:
        source = _source(source)
    if source.target is getitem:
        return _source(source).target is aten.convolution_backward.default
    return source.target in _products()


def _is_counter(node: Node) -> bool:
    """Return whether a node adds 1 to a counter of batches that is written back."""
    if node.target is not aten.add.Tensor or node.args[1:] != (1,) or node.kwargs:
        return False
    written = [(user.target, user.args[0]) for user in node.users]
    return _is_small(node) and written == [(aten.copy_.default, node.args[0])]


# The kinds to join: a predicate on nodes, the op on all of them, and the name in reports.
KINDS: dict[str, tuple[Callable[[Node], bool], Any, str]] = {
    "weight": (_is_weight, ops.foreach.foreach_convert._opoverload, "weights converted"),
    "gradient": (_is_gradient, ops.foreach.foreach_convert._opoverload, "gradients converted"),
    "counter": (_is_counter, aten._foreach_add.Scalar, "counters"),
}


def _converts(node: Node) -> bool:
    return node.target is CONVERT and _is_small(node)


def _is_small(node: Node) -> bool:
    value, source = node.meta["val"], _source(node).meta["val"]
    sizes = (*value.shape, *source.stride())
    return (
        on_gpu(value.device)
        and all(isinstance(size, int) for size in sizes)
        and 0 < value.numel() < LARGEST
        and aten.is_non_overlapping_and_dense(source)
    )


def on_gpu(device: torch.device) -> bool:
    """Return whether Inductor compiles list ops to one kernel on this device."""
    return device.type == "cuda"


def _source(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _read_by_libraries(node: Node) -> bool:
    """Return whether only library calls read the node, and not as an activation.

    Inductor fuses the conversion of an activation with that to another layout.
    """
    return all(
        user.op == "output"
        or user.target in _products()
        or (user.target in WEIGHT and _operands(user, node) == [WEIGHT[user.target]])
        or (user.target in VIEWS and _read_by_libraries(user))
        for user in node.users
    )


def _operands(user: Node, node: Node) -> list[int]:
    return [at for at, argument in enumerate(user.args) if argument is node]


def _products() -> tuple[Any, ...]:
    """Return the GEMMs that are library calls.

    With autotuning they may be templates of Inductor, which convert by themselves.
    """
    return () if inductor.max_autotune or inductor.max_autotune_gemm else PRODUCTS


def _join(graph: torch.fx.Graph, group: list[Node], op: Any) -> None:
    """Insert one call of `op` where all operands are available, and replace the nodes."""
    sources = [_source(node) for node in group]
    order = {node: at for at, node in enumerate(graph.nodes)}
    last = max(group, key=order.__getitem__) if _moves_down(sources) else group[0]
    with graph.inserting_before(last):
        rest = (group[0].args[1],)
        joint = graph.call_function(op, (sources, *rest))
        shares = [graph.call_function(getitem, (joint, i)) for i in range(len(group))]
    joint.meta = {key: value for key, value in group[0].meta.items() if key != "val"}
    joint.meta["val"] = [node.meta["val"] for node in group]
    for node, share in zip(group, shares, strict=True):
        share.meta = dict(node.meta)
        node.replace_all_uses_with(share)
        graph.erase_node(node)


def _moves_down(sources: list[Node]) -> bool:
    return any(source.op != "placeholder" for source in sources)

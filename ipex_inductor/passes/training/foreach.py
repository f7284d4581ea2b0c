"""Small kernels of a training graph that do the same to many tensors on a GPU, as one kernel.

    convert_element_type(weight, dtype), ...    => foreach_convert([weight, ...], dtype)
    convert_element_type(gradient, dtype), ...  => foreach_convert([gradient, ...], dtype)
    add(counter, 1), ...                        => _foreach_add([counter, ...], 1)

Under autocast a step of ResNet-50 has 161 of them, of 1 to 3 us each, which the host takes longer
to launch. Inductor makes loops of what is elementwise, but no loop over tensors. Converted together
is what is a kernel by itself anyway: between memory and calls of libraries.
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
FEWEST = 4  # of a kind that are worth it
LARGEST = 1 << 22  # elements: such a kernel works longer than its launch takes (5 us on an H200)
ALIVE = 1 << 25  # elements of one list: gradients wait in both dtypes until the last is there

CONVERT = prims.convert_element_type.default
VIEWS = (aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default)
WEIGHT = {aten.convolution.default: 1, aten.convolution_backward.default: 2}  # which operand
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def gather(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Join what is alike in `graph`, which AOT autograd made for training, forward or backward."""
    changed = False
    for kind, nodes in _alike(graph).items():
        for group in _portions(nodes):
            if len(group) >= FEWEST:
                _join(graph, group, KINDS[kind[0]][1])
                counters["ipex"][NAME] += 1
                report.add("fired", NAME, f"{len(group)} {KINDS[kind[0]][2]}")
                changed = True
    if changed:
        graph.lint()


def _alike(graph: torch.fx.Graph) -> dict[tuple[Any, ...], list[Node]]:
    """By kind, device and dtypes, in the order of the graph."""
    found: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.nodes:
        kind = next((name for name, (fits, *_) in KINDS.items() if fits(node)), None)
        if kind is not None:
            source, made = node.args[0].meta["val"], node.meta["val"]
            found.setdefault((kind, made.device, source.dtype, made.dtype), []).append(node)
    return found


def _portions(nodes: list[Node]) -> Iterator[list[Node]]:
    """Of at most `ALIVE` elements each."""
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
    """A parameter's copy in another dtype that only calls of libraries read."""
    return _converts(node) and _source(node).op == "placeholder" and _read_by_libraries(node)


def _is_gradient(node: Node) -> bool:
    """What a call of a library computed, for the caller in another dtype."""
    if not _converts(node) or any(user.op != "output" for user in node.users):
        return False
    made = _source(node)
    while made.target in VIEWS:
        made = _source(made)
    if made.target is getitem:
        return _source(made).target is aten.convolution_backward.default
    return made.target in _products()


def _is_counter(node: Node) -> bool:
    """How many batches there were, and one more."""
    if node.target is not aten.add.Tensor or node.args[1:] != (1,) or node.kwargs:
        return False
    written = [(user.target, user.args[0]) for user in node.users]
    return _is_small(node) and written == [(aten.copy_.default, node.args[0])]


# What is gathered: whether a node is one, the op on all of them, what they are called.
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
    """Whether Inductor makes one kernel of a list there."""
    return device.type == "cuda"


def _source(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _read_by_libraries(node: Node) -> bool:
    """Not as an image, whose conversion Inductor joins with that to another layout."""
    return all(
        user.op == "output"
        or user.target in _products()
        or (user.target in WEIGHT and _operands(user, node) == [WEIGHT[user.target]])
        or (user.target in VIEWS and _read_by_libraries(user))
        for user in node.users
    )


def _operands(user: Node, node: Node) -> list[int]:
    return [at for at, given in enumerate(user.args) if given is node]


def _products() -> tuple[Any, ...]:
    """Products that are calls of libraries: a template of Inductor's converts by itself."""
    return () if inductor.max_autotune or inductor.max_autotune_gemm else PRODUCTS


def _join(graph: torch.fx.Graph, group: list[Node], op: Any) -> None:
    """One call of `op` where all of them are known: behind the last of their sources."""
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

"""Take work that depends on weights alone out of an inference graph: the weight preprocessing."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from ipex_inductor import compat
from ipex_inductor.passes.weights import upcast
from ipex_inductor.passes.weights.blocked import in_blocks
from ipex_inductor.passes.weights.cached_primitives import with_kept_primitive
from ipex_inductor.passes.weights.packing import (
    ARRANGED,
    PACKERS,
    READERS,
    Product,
    WhyPlain,
    also_in,
    fit_to_kernels,
    pack_weights,
)
from ipex_inductor.passes.weights.program import Program, record
from ipex_inductor.passes.weights.pure import is_pure, is_repeatable
from ipex_inductor.passes.weights.sycl import DTYPES, WhyNot, take
from ipex_inductor.passes.weights.winograd import by_tiles
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
# Returns why kernels are unavailable, or None; None in its place disables them.
WhyUnavailable = Callable[[], str | None] | None
# Their results are read in any case, and are not opaque.
ARRANGERS = (
    torch.ops.ipex.sycl_packed.default,
    torch.ops.ipex.int8_weight.default,
    torch.ops.ipex.weight_only_factors.default,
)
SCALE_OPS = (torch.ops.ipex.int8_factors.default, torch.ops.ipex.int8_scales.default)
GROUPED = torch.ops.ipex.conv_grouped.default
# Calls that nothing is fused into: their inputs are materialized.
CALLS = frozenset({torch.ops.ipex.conv.default, torch.ops.ipex.linear.default, *ARRANGED})
SMALL = 1 << 20  # bytes; a tensor up to this size stays in cache, so it may grow


@dataclass(frozen=True)
class Split:
    """A graph without its weight-only work: `gm` takes the derived tensors as last inputs.

    `reads`: numbers, among all inputs of the original graph, of the inputs that come before them.
    `repeats`: whether the graph may run again on equal inputs: see `is_repeatable`.
    """

    gm: torch.fx.GraphModule
    example_inputs: list[Any]
    static_input_idxs: list[int]
    programs: tuple[Program, ...]
    reads: tuple[int, ...]
    repeats: bool

    def without_unread(self) -> "Split":
        """Return the split without graph inputs for weights that only programs read."""
        placeholders, static = self.gm.graph.find_nodes(op="placeholder"), {*self.static_input_idxs}
        unread = {n for n in static if not placeholders[n].users and _is_static(placeholders[n])}
        for n in unread:
            self.gm.graph.erase_node(placeholders[n])
        self.gm.recompile()
        remaining = [n for n in range(len(placeholders)) if n not in unread]
        return replace(
            self,
            example_inputs=[self.example_inputs[n] for n in remaining],
            static_input_idxs=[at for at, n in enumerate(remaining) if n in static],
            reads=tuple(self.reads[n] for n in remaining if n < len(self.reads)),
        )


@dataclass
class _Budget:
    """The bytes that results may still take, and the number of tensors that did not fit."""

    remaining: float
    refused: int = 0

    def take(self, size: int) -> bool:
        """Take `size` bytes if they fit; return whether they do."""
        fits = size <= self.remaining
        self.remaining -= size if fits else 0
        self.refused += not fits
        return fits


def split(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    static_input_idxs: Sequence[int],
    report: GraphReport,
    limit: int = -1,
    sycl: WhyNot | None = None,
    why_not_blocked: WhyUnavailable = None,
    why_not_kept: WhyUnavailable = None,
    narrow: frozenset[torch.dtype] = frozenset(),
    drops: bool = False,
    why_plain: WhyPlain | None = None,
    in_python: bool = False,
) -> Split | None:
    """Pack and hoist the weight-only work of `gm` (changed in place); None when there is none.

    Args:
        gm: The inference graph.
        example_inputs: Its fake inputs.
        static_input_idxs: The inputs that are parameters or buffers. Without any, our ops are only
            unfused again.
        report: Gets the decisions.
        limit: The most bytes that results may take, negative for no bound.
        sycl: Returns why a SYCL kernel is not used; where it has no reason, SYCL kernels come
            first.
        why_not_blocked: Returns why weights in blocks are not available, called where they would be
            faster; None disables them.
        why_not_kept: Returns why oneDNN's cached primitives are not available, likewise.
        narrow: The dtypes whose products are computed in fp32.
        drops: Whether weights on the CPU that nothing else reads are freed after their program.
        why_plain: Returns why a product's weight is not packed.
        in_python: Whether Python calls the kernels. To call ours takes some 25 microseconds (row
            `decision_transformer` of benchmarks/zoo.py), so products that `why_plain` has a reason
            for stay plain.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    weights = weight_inputs(gm.graph, static_input_idxs)
    if sycl is not None:
        with also_in(DTYPES):
            take(gm.graph, with_derived(gm.graph, weights), report, sycl)
    budget = _Budget(limit if limit >= 0 else math.inf)
    stays = why_plain if in_python else None
    arrange = functools.partial(_arrange, why_not_blocked, why_not_kept, stays, budget)
    with also_in(narrow):
        fit_to_kernels(gm.graph, with_derived(gm.graph, weights), report, why_plain)
        if weights and narrow:
            weight_nodes = with_derived(gm.graph, weights)
            upcast.widen(gm.graph, weight_nodes, narrow, report, why_not_blocked)
        packable = _packed_sizes(gm.graph, with_derived(gm.graph, weights))
        if limit < 0:
            packable = _without_quantized(packable, weights, report)
        chosen = {n for n, size in packable.items() if budget.take(size)}
        pack_weights(gm.graph, chosen, report, arrange, why_plain)
    for inner in gm.modules():  # bodies of higher-order ops, whose inputs have no graph numbers
        if isinstance(inner, torch.fx.GraphModule) and inner is not gm:
            pack_weights(inner.graph, (), report)
            inner.recompile()
    derived = weight_only(gm.graph, weights)
    worth = [n for n in derived if _worth_hoisting(n, derived)]
    outputs = [n for n in worth if n.target in PACKERS or budget.take(_bytes(n.meta["val"]))]
    outputs = _read_by_the_rest(gm.graph, outputs)
    if budget.refused:
        reason = f"{budget.refused} tensors are beyond weight_prologue_bytes={limit}"
        report.add("missed", "weight preprocessing", f"{reason}: left in the graph")
    if not outputs:
        gm.recompile()
        return None
    needed = _ancestors(outputs, derived)
    parts = _independent(n for n in derived if n in needed)
    outputs = [n for part in parts for n in part if n in outputs]
    programs = tuple(_program(part, outputs, weights) for part in parts)
    report.add("hoisted", "weight preprocessing", _summary(outputs, programs))
    _replace_by_inputs(gm.graph, placeholders[-1], outputs)
    gm.recompile()
    if drops:
        programs = _mark_drops(programs, weights, report)
    count = len(placeholders)
    return Split(
        gm,
        [*example_inputs, *(n.meta["val"] for n in outputs)],
        [*static_input_idxs, *range(count, count + len(outputs))],
        programs,
        tuple(range(count)),
        is_repeatable(gm.graph, {placeholders[i] for i in static_input_idxs if i < count}),
    )


def _arrange(
    in_blocks_not: WhyUnavailable,
    kept_not: WhyUnavailable,
    stays: WhyPlain | None,
    budget: _Budget,
    product: Product,
) -> Product | None:
    """Return the product by a kernel of ours or a cached primitive, where that is faster, or None.

    Args:
        in_blocks_not: Returns why weights in blocks are not available; None disables them.
        kept_not: Returns why cached primitives are not available; None disables them.
        stays: Returns why a product stays on its plain weight.
        budget: Gives the bytes by which the weight grows.
        product: The product on oneDNN's packed weight.
    """
    if stays and stays(product):
        return None
    if in_blocks_not and (candidate := in_blocks(product) or by_tiles(product)):
        value = product.weight.meta["val"]
        more = math.prod(candidate.shape) * (candidate.dtype or value.dtype).itemsize - _bytes(
            value
        )
        if more <= budget.remaining and in_blocks_not() is None:
            budget.take(more)
            return candidate
    return with_kept_primitive(product, kept_not) if kept_not else None


def weight_inputs(graph: torch.fx.Graph, numbers: Iterable[int]) -> dict[Node, int]:
    """Return the inputs with these numbers that can be hoisted and whose changes can be seen.

    Left out are inputs that the graph writes, parts of a tensor subclass (a DTensor's shard), whose
    version stands still when the subclass is written, and inputs of a higher-order op's body.
    """
    placeholders = graph.find_nodes(op="placeholder")
    written = written_inputs(graph)
    inputs = {placeholders[i]: i for i in numbers if i < len(placeholders)}
    return {
        node: i
        for node, i in inputs.items()
        if node not in written and compat.is_own_input(node) and _is_strided(node.meta.get("val"))
    }


def _packed_sizes(graph: torch.fx.Graph, weights: Container[Node]) -> dict[Node, int]:
    """Return the weights that can be packed, with the bytes that all packed copies take."""
    sizes: dict[Node, int] = {}
    for node in graph.nodes:
        product = READERS[node.target](node) if node.target in READERS else None
        if product is not None and product.weight in weights and _is_static(product.weight):
            size = _bytes(product.weight.meta["val"])
            sizes[product.weight] = sizes.get(product.weight, 0) + size
    return sizes


def _without_quantized(
    sizes: dict[Node, int], weights: dict[Node, int], report: GraphReport
) -> dict[Node, int]:
    """Leave out weights that are stored in one byte an element and would be packed larger.

    They were quantized to save memory; packed copies would take it again, besides the originals. A
    bound of `weight_prologue_bytes` allows them.
    """
    remaining, grown = dict(sizes), 0
    for node, size in sizes.items():
        sources = _sources(node, weights)
        values = [source.meta["val"] for source in sources]
        if not any(value.element_size() == 1 and value.numel() > SMALL for value in values):
            continue
        if size > sum(map(_bytes, values)):
            grown += size
            del remaining[node]
    if grown:
        reason = (
            f"{grown / 2**20:.1f} MiB would be packed of quantized weights: they are read as they"
        )
        report.add(
            "missed", "weight preprocessing", f"{reason} are (weight_prologue_bytes allows it)"
        )
    return remaining


def _sources(node: Node, weights: Container[Node]) -> set[Node]:
    """Return the weights that a weight-only node is computed from."""
    sources, pending, visited = set(), [node], set()
    while pending:
        current = pending.pop()
        if current in visited:
            continue
        visited.add(current)
        if current in weights:
            sources.add(current)
        pending.extend(current.all_input_nodes)
    return sources


def written_inputs(graph: torch.fx.Graph) -> set[Node]:
    """Return the inputs that some node writes to, or may write to (higher-order ops)."""
    written: set[Node] = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            written.update(node.all_input_nodes)
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for value, argument in zip(node.args, node.target._schema.arguments, strict=False):
            if argument.alias_info and argument.alias_info.is_write and isinstance(value, Node):
                written.add(value)
    return written


def weight_only(graph: torch.fx.Graph, weights: Container[Node]) -> dict[Node, None]:
    """Return the pure nodes that depend on weights and constants alone, in graph order."""
    derived: dict[Node, None] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if not inputs and not _is_scale(node):
            continue
        if is_pure(node) and all(n in weights or n in derived for n in inputs):
            derived[node] = None
    return derived


def _is_scale(node: Node) -> bool:
    """Return whether a node is a constant that only ops on scales of quantized weights read."""
    is_constant = node.target is torch.ops.aten.full.default
    return is_constant and all(user.target in SCALE_OPS for user in node.users)


def with_derived(graph: torch.fx.Graph, weights: dict[Node, int]) -> dict[Node, int | None]:
    """Return weights and the pure nodes that depend on them and constants alone."""
    return {**weights, **weight_only(graph, weights)}


def _worth_hoisting(node: Node, derived: dict[Node, None]) -> bool:
    """Return whether to compute `node` ahead: the graph's rest reads it, and it has a cost.

    A view or a widening cast is free where it stands. A large tensor that is larger than its
    sources costs more to read than to compute, except for the blocks of a grouped convolution,
    which are read in any case. A tensor that the caller gets may be written by the caller.
    """
    if node.target in PACKERS or node.target in ARRANGERS:
        return True
    if all(user in derived for user in node.users) or _leaves_the_graph(node):
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not _is_static(node):
        return False
    links = _ancestors([node], derived)
    sources = {n for link in links for n in link.all_input_nodes if n not in derived}
    grows = _bytes(value) > sum(_bytes(n.meta["val"]) for n in sources)
    if all(_is_view(n) or (grows and n.target in CASTS) for n in links):
        return node.target in CASTS and any(n.target in CALLS for n in node.users)
    return not grows or _bytes(value) <= SMALL or any(n.target is GROUPED for n in node.users)


def _read_by_the_rest(graph: torch.fx.Graph, outputs: Sequence[Node]) -> list[Node]:
    """Return the outputs that are read by something that is not computed ahead itself.

    A packed weight has no such reader where its product is on weights too: the graph would take a
    tensor that it does not use.
    """
    cut, reached = {*outputs}, set[Node]()
    pending = [node for node in graph.nodes if node.op == "output" or node.is_impure()]
    while pending:
        fresh = {*pending.pop().all_input_nodes} - reached
        reached |= fresh
        pending.extend(fresh - cut)
    return [node for node in outputs if node in reached]


def _leaves_the_graph(node: Node) -> bool:
    """Return whether the caller gets `node` or a view of it, and could write it."""
    return any(
        user.op == "output" or (_is_view(user) and _leaves_the_graph(user)) for user in node.users
    )


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _is_static(node: Node) -> bool:
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _ancestors(nodes: Sequence[Node], within: dict[Node, None]) -> set[Node]:
    ancestors: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending.extend(n for n in node.all_input_nodes if n in within)
    return ancestors


def _independent(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return `nodes`, which come in graph order, in parts between which no value passes."""
    parts: dict[Node, list[Node]] = {}
    for node in nodes:
        joined = {id(parts[n]): parts[n] for n in node.all_input_nodes if n in parts}
        part = [*chain.from_iterable(joined.values()), node]
        parts.update(dict.fromkeys(part, part))
    return list({id(part): part for part in parts.values()}.values())


def _program(part: list[Node], outputs: Sequence[Node], weights: dict[Node, int]) -> Program:
    used = {n: weights[n] for node in part for n in node.all_input_nodes if n in weights}
    return record(used, part, [n for n in part if n in outputs])


def _mark_drops(
    programs: Sequence[Program], weights: dict[Node, int], report: GraphReport
) -> tuple[Program, ...]:
    """Set `drops` on the programs that are the only readers of their weights."""
    unread = {i for n, i in weights.items() if not n.users and n.meta["val"].device.type == "cpu"}
    readers = Counter(i for program in programs for i in program.inputs)
    alone = {i for i in unread if readers[i] == 1}
    marked = tuple(replace(p, drops=alone.issuperset(p.inputs)) for p in programs)
    dropped = {i for program in marked if program.drops for i in program.inputs}
    size = sum(_bytes(n.meta["val"]) for n, i in weights.items() if i in dropped) / 2**20
    if dropped:
        message = f"{len(dropped)}, {size:.1f} MiB, are freed if nothing else has them"
        report.add("hoisted", "plain weights", message)
    return marked


def _summary(outputs: Sequence[Node], programs: Sequence[Program]) -> str:
    size = sum(_bytes(n.meta["val"]) for n in outputs) / 2**20
    weights = {i for program in programs for i in program.inputs}
    return f"{len(outputs)} tensors, {size:.1f} MiB, of {len(weights)} weights"


def _replace_by_inputs(graph: torch.fx.Graph, last: Node, outputs: Sequence[Node]) -> None:
    for number, node in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.placeholder(f"derived_{number}")
        last.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(last)
    graph.eliminate_dead_code()

"""Take work that depends on weights alone out of an inference graph: the weight preprocessing."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ipex_inductor.passes.weights import upcast
from ipex_inductor.passes.weights.blocked import in_blocks
from ipex_inductor.passes.weights.cached_primitives import with_kept_primitive
from ipex_inductor.passes.weights.packing import (
    PACKERS,
    READERS,
    Product,
    WhyPlain,
    also_in,
    fit_to_kernels,
    pack_weights,
)
from ipex_inductor.passes.weights.program import Program, record
from ipex_inductor.passes.weights.pure import is_repeatable
from ipex_inductor.passes.weights.sycl import DTYPES, WhyNot, take
from ipex_inductor.passes.weights.weight_nodes import (
    SMALL,
    count_bytes,
    drop_unread,
    find_ancestors,
    is_static,
    is_worth_hoisting,
    join_dependent,
    weight_inputs,
    weight_only,
    with_derived,
)
from ipex_inductor.passes.weights.winograd import by_tiles
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node

# Returns why kernels are unavailable, or None; None in its place disables them.
WhyUnavailable = Callable[[], str | None] | None


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
        unread = {n for n in static if not placeholders[n].users and is_static(placeholders[n])}
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


@dataclass(frozen=True)
class SplitSettings:
    """The kernels and the memory that weight preprocessing may use.

    Attributes:
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

    limit: int = -1
    sycl: WhyNot | None = None
    why_not_blocked: WhyUnavailable = None
    why_not_kept: WhyUnavailable = None
    narrow: frozenset[torch.dtype] = frozenset()
    drops: bool = False
    why_plain: WhyPlain | None = None
    in_python: bool = False


def split(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    static_input_idxs: Sequence[int],
    report: GraphReport,
    settings: SplitSettings | None = None,
) -> Split | None:
    """Pack and hoist the weight-only work of `gm` (changed in place); None when there is none.

    Args:
        gm: The inference graph.
        example_inputs: Its fake inputs.
        static_input_idxs: The inputs that are parameters or buffers. Without any, our ops are only
            unfused again.
        report: Gets the decisions.
        settings: Kernels and memory that may be used; without, oneDNN's packed weights only.
    """
    settings = settings or SplitSettings()
    placeholders = gm.graph.find_nodes(op="placeholder")
    weights = weight_inputs(gm.graph, static_input_idxs)
    budget = _Budget(settings.limit if settings.limit >= 0 else math.inf)
    _arrange_weights(gm, weights, budget, report, settings)
    outputs, parts = _choose_outputs(gm.graph, weights, budget)
    if budget.refused:
        reason = f"{budget.refused} tensors are beyond weight_prologue_bytes={settings.limit}"
        report.add("missed", "weight preprocessing", f"{reason}: left in the graph")
    if not outputs:
        _round_to_nearest(gm.graph)
        gm.recompile()
        return None
    programs = tuple(_program(part, outputs, weights) for part in parts)
    report.add("hoisted", "weight preprocessing", _summary(outputs, programs))
    _replace_by_inputs(gm.graph, placeholders[-1], outputs)
    _round_to_nearest(gm.graph)
    gm.recompile()
    if settings.drops:
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


def _round_to_nearest(graph: torch.fx.Graph) -> None:
    """Replace balanced rounding of weights that stayed in the graph: it is slow in each call."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.ipex.round_balanced.default):
        with graph.inserting_before(node):
            cast = graph.call_function(torch.ops.prims.convert_element_type.default, node.args[:2])
        cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast)
        graph.erase_node(node)


def _arrange_weights(
    gm: torch.fx.GraphModule,
    weights: dict[Node, int],
    budget: _Budget,
    report: GraphReport,
    settings: SplitSettings,
) -> None:
    """Rewrite products on weights for the kernels that read them packed, within the budget."""
    if settings.sycl is not None:
        with also_in(DTYPES):
            take(gm.graph, with_derived(gm.graph, weights), report, settings.sycl)
    narrow, why_plain = settings.narrow, settings.why_plain
    arrange = functools.partial(_arrange, settings, budget)
    with also_in(narrow):
        fit_to_kernels(gm.graph, with_derived(gm.graph, weights), report, why_plain)
        if weights and narrow:
            weight_nodes = with_derived(gm.graph, weights)
            upcast.widen(gm.graph, weight_nodes, narrow, report, settings.why_not_blocked)
        packable = _packed_sizes(gm.graph, with_derived(gm.graph, weights))
        if settings.limit < 0:
            packable = _without_quantized(packable, weights, report)
        chosen = {n for n, size in packable.items() if budget.take(size)}
        pack_weights(gm.graph, chosen, report, arrange, why_plain)
    for inner in gm.modules():  # bodies of higher-order ops, whose inputs have no graph numbers
        if isinstance(inner, torch.fx.GraphModule) and inner is not gm:
            pack_weights(inner.graph, (), report)
            inner.recompile()


def _choose_outputs(
    graph: torch.fx.Graph, weights: dict[Node, int], budget: _Budget
) -> tuple[list[Node], list[list[Node]]]:
    """Return the nodes to compute ahead, and the work for them in independent parts."""
    derived = weight_only(graph, weights)
    worth = [n for n in derived if is_worth_hoisting(n, derived)]
    outputs = [n for n in worth if n.target in PACKERS or budget.take(count_bytes(n.meta["val"]))]
    outputs = drop_unread(graph, outputs)
    needed = find_ancestors(outputs, derived)
    parts = join_dependent(n for n in derived if n in needed)
    return [n for part in parts for n in part if n in outputs], parts


def _arrange(settings: SplitSettings, budget: _Budget, product: Product) -> Product | None:
    """Return the product by a kernel of ours or a cached primitive, where that is faster, or None.

    Args:
        settings: Says which kernels are available, and which products stay on plain weights.
        budget: Gives the bytes by which the weight grows.
        product: The product on oneDNN's packed weight.
    """
    if settings.in_python and settings.why_plain and settings.why_plain(product):
        return None
    why_not_blocked, why_not_kept = settings.why_not_blocked, settings.why_not_kept
    if why_not_blocked and (candidate := in_blocks(product) or by_tiles(product)):
        value = product.weight.meta["val"]
        size = math.prod(candidate.shape) * (candidate.dtype or value.dtype).itemsize
        more = size - count_bytes(value)
        if more <= budget.remaining and why_not_blocked() is None:
            budget.take(more)
            return candidate
    return with_kept_primitive(product, why_not_kept) if why_not_kept else None


def _packed_sizes(graph: torch.fx.Graph, weights: Container[Node]) -> dict[Node, int]:
    """Return the weights that can be packed, with the bytes that all packed copies take."""
    sizes: dict[Node, int] = {}
    for node in graph.nodes:
        product = READERS[node.target](node) if node.target in READERS else None
        if product is not None and product.weight in weights and is_static(product.weight):
            size = count_bytes(product.weight.meta["val"])
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
        if size > sum(map(count_bytes, values)):
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
    size = sum(count_bytes(n.meta["val"]) for n, i in weights.items() if i in dropped) / 2**20
    if dropped:
        message = f"{len(dropped)}, {size:.1f} MiB, are freed if nothing else has them"
        report.add("hoisted", "plain weights", message)
    return marked


def _summary(outputs: Sequence[Node], programs: Sequence[Program]) -> str:
    size = sum(count_bytes(n.meta["val"]) for n in outputs) / 2**20
    weights = {i for program in programs for i in program.inputs}
    return f"{len(outputs)} tensors, {size:.1f} MiB, of {len(weights)} weights"


def _replace_by_inputs(graph: torch.fx.Graph, last: Node, outputs: Sequence[Node]) -> None:
    for number, node in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.placeholder(f"derived_{number}")
        last.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(last)
    graph.eliminate_dead_code()

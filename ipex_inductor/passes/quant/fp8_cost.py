"""Leave linear layers of a training graph in floating point where FP8 would take longer.

Both times are estimated from the GPU's rates: GEMMs of a layer and of its gradients, the bytes that
quantizations and transposes move, and launches. FP8 also takes time of the host, once a step. Sizes
that vary count as they are when the graph is compiled. A layer that is left records nothing, so its
scales stay as they are.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ipex_inductor import compat
from ipex_inductor.ops.quant.fp8 import why_not_multiplied
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import EAGER_STRIDES, compute_value
from ipex_inductor.passes.quant.fp8_records import BASES, COLUMNS, MAXIMA, is_record
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.target.device import Target, nvidia

aten, ipex, prims = torch.ops.aten, torch.ops.ipex, torch.ops.prims
NAME = "fp8 cost"
GEMM, QUANTIZE = ipex.fp8_gemm.default, ipex.fp8_quantize.default
TRANSPOSED, READ = ipex.fp8_quantize_transposed.default, ipex.fp8_read_scales.default
RATES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Parts of the peak that GEMMs and kernels reach. Layers of 8192 x 4096 x 14336 took 4.1 ms in bf16
# on an H200, and kernels of FP8 2.4 ms (benchmarks/results/fp8_gpu.jsonl, docs/notes/56.md).
EFFICIENCY = {"fp8": 0.69, "other": 0.72, "memory": 0.8}
# Seconds: of a launch by generated code, which is an estimate, and of what else the host does in a
# step with FP8 (`host_ms` of one layer in benchmarks/results/fp8_gpu.jsonl, H200, torch 2.11).
LAUNCH, STEP = 6e-6, 1.9e-3
MOVES = (aten.permute.default, aten.t.default)
LAUNCHES = {QUANTIZE: 2, TRANSPOSED: 1, **dict.fromkeys(MOVES, 1)}
UNREAD = {QUANTIZE, TRANSPOSED, READ, *MOVES} | {
    *(operator.getitem, aten.select.int, aten.unbind.int, aten.slice.Tensor),
}


@dataclass
class Operand:
    """An operand that a GEMM reads.

    Args:
        source: quantization of it in the forward, or of a gradient.
        node: node that the GEMM reads.
        turned: the GEMM reads the transpose.
    """

    source: Node
    node: Node
    turned: bool

    @property
    def dtype(self) -> torch.dtype:
        """Return its FP8 dtype."""
        dtype: torch.dtype = self.node.meta["val"].dtype
        return dtype


@dataclass
class Layer:
    """GEMMs of a linear layer and of its gradients, by the quantizations that they share."""

    gemms: list[tuple[Node, Operand, Operand]] = field(default_factory=list)
    sources: set[Node] = field(default_factory=set)


@dataclass(frozen=True)
class Cost:
    """Estimated seconds of a layer and its gradients, without the host's time of a step."""

    fp8: float
    other: float


def leave_small(graph: Graph, report: GraphReport) -> None:
    """Replace FP8 GEMMs of layers that would take longer than in the dtype of their inputs."""
    costs = [(layer, estimate(layer)) for layer in find_layers(graph)]
    known = [(layer, cost) for layer, cost in costs if cost is not None]
    slow = [each for each in known if each[1].fp8 >= each[1].other]
    fast = [cost for _, cost in known if cost.fp8 < cost.other]
    reason = "quantization takes longer than FP8 saves"
    is_hidden = sum(cost.other for cost in fast) > max(STEP, sum(cost.fp8 for cost in fast))
    if len(known) == len(costs) and not is_hidden:
        slow, reason = known, "all its GEMMs take less time than the host needs in a step with FP8"
    left: set[Node] = set()
    for layer, cost in slow:
        gemm, a, _ = layer.gemms[0]
        sizes = "M, N, K of {}, {}, {}".format(*_sizes(gemm, a))
        dtype = str(gemm.meta["val"].dtype).removeprefix("torch.")
        times = f"{cost.fp8 * 1e6:.0f} us in FP8, {cost.other * 1e6:.0f} us in {dtype}"
        where = user_line(gemm)
        report.add("missed", NAME, f"{sizes}: {reason} (estimated {times})", where)
        for gemm, a, b in layer.gemms:
            _replace(graph, gemm, a, b, layer.gemms[0][0].meta["val"].dtype)
        left |= layer.sources
    if left:
        _drop_records(graph, left)
        for node in reversed(graph.nodes):
            if node.target in UNREAD and not node.users:
                graph.erase_node(node)


def estimate(layer: Layer) -> Cost | None:
    """Return the cost of a layer; None on other devices than GPUs, for unknown rates or sizes."""
    value = layer.gemms[0][0].meta["val"]
    target = nvidia(value.device)
    rates = None if target is None else _rates(target, RATES.get(value.dtype, ""))
    sizes = [_sizes(gemm, a) for gemm, a, _ in layer.gemms]
    if rates is None or any(None in each for each in sizes):
        return None
    if any(why_not_multiplied(a.dtype, b.dtype) for _, a, b in layer.gemms):  # calls raise an error
        return None
    work = sum(2.0 * math.prod(each) for each in sizes)
    moved = launches = 0
    for node in {*layer.sources, *(o.node for _, a, b in layer.gemms for o in (a, b))}:
        if node.target in LAUNCHES:
            source: Any = node.args[0]
            size = math.prod(compat.hints(source.meta["val"]))
            moved += size * (source.meta["val"].dtype.itemsize + 1)  # written in one byte
            launches += LAUNCHES[node.target]
    fp8_rate, other_rate, bandwidth = rates
    fp8 = work / fp8_rate + moved / bandwidth + launches * LAUNCH
    return Cost(fp8, work / other_rate)


def _sizes(gemm: Node, a: Operand) -> tuple[Any, Any, Any]:
    """Return M, N and K of a GEMM, None for those that are not known."""
    rows, depth = compat.hints(a.node.meta["val"])
    return rows, compat.hints(gemm.meta["val"])[1], depth


def _rates(target: Target, name: str) -> tuple[float, float, float] | None:
    """Return operations/s of GEMMs in FP8 and in another dtype, and bytes/s of memory."""
    fp8, other, bandwidth = target.rate("fp8"), target.rate(name), target.bandwidth
    if not (fp8 and other and bandwidth):
        return None
    parts = EFFICIENCY
    return fp8 * parts["fp8"], other * parts["other"], bandwidth * parts["memory"]


def find_layers(graph: Graph) -> list[Layer]:
    """Return the layers of a graph; those with operands that are read otherwise are left out."""
    weights: dict[Any, Node] = {}
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        weights.setdefault((node.args[0], _pair(node.args[1])), node)
    layer_of: dict[Node, Layer] = {}
    unknown: set[int] = set()
    for gemm in graph.find_nodes(op="call_function", target=GEMM):
        a, b = (_find_operand(node, weights) for node in gemm.args[:2])
        sources = [operand.source for operand in (a, b) if operand is not None]
        layers = {id(layer_of[s]): layer_of[s] for s in sources if s in layer_of}
        layer = _join(layers.values())
        layer.sources.update(sources)
        layer_of.update(dict.fromkeys(layer.sources, layer))
        if unknown & layers.keys() or a is None or b is None:
            unknown.add(id(layer))
        if a is not None and b is not None:
            layer.gemms.append((gemm, a, b))
    unique = {id(layer): layer for layer in layer_of.values()}
    return [layer for number, layer in unique.items() if number not in unknown and layer.gemms]


def _join(layers: Iterable[Layer]) -> Layer:
    """Return the first of some layers with the GEMMs of the others, or a new one."""
    first, *others = [*layers] or [Layer()]
    for other in others:
        first.gemms += other.gemms
        first.sources |= other.sources
    return first


def _pair(scale: Any) -> Any:
    """Return the node from which a scale is selected."""
    return scale.args[0] if scale.target is aten.select.int else scale


def _find_operand(node: Any, weights: dict[Any, Node]) -> Operand | None:
    """Return the quantization that an operand of a GEMM comes from, None if it is another node."""
    if node.target is TRANSPOSED:
        source = weights.get((node.args[0], _pair(node.args[1])))
        return None if source is None else Operand(source, node, turned=True)
    inner, turned = node, False
    if inner.target in MOVES and inner.meta["val"].dim() == 2:
        inner, turned = inner.args[0], True
    if inner.target is operator.getitem and inner.args[0].target is QUANTIZE and not inner.args[1]:
        return Operand(inner.args[0], node, turned)
    return None


def _replace(graph: Graph, gemm: Node, a: Operand, b: Operand, dtype: torch.dtype) -> None:
    """Replace an FP8 GEMM by one of operands that are not rounded to FP8.

    Args:
        graph: the graph, changed in place.
        gemm: `fp8_gemm`.
        a: its first operand, [M, K].
        b: its second operand, [N, K].
        dtype: of both operands.
    """

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta = {**gemm.meta}
        node.meta.pop(EAGER_STRIDES, None)
        node.meta["val"] = compute_value(node)
        return node

    def cast(node: Any, to: torch.dtype) -> Node:
        same = node.meta["val"].dtype is to
        return node if same else call(prims.convert_element_type.default, node, to)

    def operand(each: Operand, turned: bool) -> Node:
        exact = cast(each.source.args[0], dtype)
        return call(aten.permute.default, exact, [1, 0]) if turned else exact

    bias: Any = gemm.args[4]
    with graph.inserting_before(gemm):
        left, right = operand(a, a.turned), operand(b, not b.turned)
        if bias is None:
            result = call(aten.mm.default, left, right)
        else:
            result = call(aten.addmm.default, cast(bias, dtype), left, right)
        result = cast(result, gemm.meta["val"].dtype)
    gemm.replace_all_uses_with(result)
    graph.erase_node(gemm)


def _drop_records(graph: Graph, left: set[Node]) -> None:
    """Record no magnitudes of tensors that are not quantized."""
    for record in [node for node in graph.nodes if is_record(node)]:
        kwargs: Any = record.kwargs
        pairs = [
            (amax, column)
            for amax, column in zip(kwargs[MAXIMA], kwargs[COLUMNS], strict=True)
            if left.isdisjoint(amax.args[:1])  # no arguments: a maximum that came into the graph
        ]
        if len(pairs) == len(kwargs[COLUMNS]):
            continue
        if pairs:
            maxima, columns = zip(*pairs, strict=True)
            record.kwargs = {**kwargs, MAXIMA: [*maxima], COLUMNS: [*columns]}
            record.meta.pop(EAGER_STRIDES, None)
            continue
        for user in list(record.users):
            if user.args[1] == 1:  # the state afterwards
                user.replace_all_uses_with(kwargs[BASES][0])
            graph.erase_node(user)
        graph.erase_node(record)

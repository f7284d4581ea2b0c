"""The default recipe: which tensors are quantized, and which operators read them so.

Layers ask for quantized inputs. A request moves up through operators that are exact on quantized
values, so one pair of quantize and dequantize nodes serves all that read a tensor. Other operators
are quantized only where int8 then runs through from layer to layer.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, Node

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.fp8_steps import LIMITS
from ipex_inductor.quantization.capture import LAYER
from ipex_inductor.quantization.chains import chain_layer, is_residual_operand
from ipex_inductor.quantization.operators import (
    ADDS,
    CATS,
    EMBEDDING_BAGS,
    LAYERS,
    LINEARS,
    MATMULS,
    POOLS,
    RELUS,
    VIEWS,
    WEIGHTED,
    is_constant,
    is_exact_work,
    is_quantizable,
    readers,
)
from ipex_inductor.quantization.scheme import Scheme, SchemeMapping


@dataclass(frozen=True)
class LayerDecision:
    """A layer, and whether it is quantized or why not.

    `inputs` are names of its quantized input tensors. `output` is that of its output, after the
    operators that are fused with the layer, "" if it stays in floating point. `weight` is the name
    of the parameter, `kind` that of the scheme.
    """

    name: str
    operator: str
    module_path: str
    quantized: bool
    reason: str = ""
    inputs: tuple[str, ...] = ()
    output: str = ""
    weight: str = ""
    weight_channels: int | None = None
    kind: str = ""


@dataclass(frozen=True)
class QuantizedWeight:
    """The weight of a layer: its argument, its dimension of output channels, its scheme."""

    layer: Node
    argument: int
    axis: int
    scheme: Scheme


@dataclass
class Plan:
    """Tensors, layers and weights of a graph that will be quantized.

    `order` are the nodes of the graph. `tensors` are those whose output is quantized, with their
    schemes. `reads` are pairs of a node and its argument that is read quantized. `moved` are
    operators that run on quantized values. `shared` maps tensors of one scale to the first.
    """

    order: list[Node]
    tensors: dict[Node, Scheme] = field(default_factory=dict)
    reads: dict[tuple[Node, Node], Scheme] = field(default_factory=dict)
    moved: set[Node] = field(default_factory=set)
    shared: dict[Node, Node] = field(default_factory=dict)
    weights: list[QuantizedWeight] = field(default_factory=list)
    decisions: list[LayerDecision] = field(default_factory=list)

    def find_root(self, node: Node) -> Node | None:
        """Return the quantized tensor that `node` is, or is made of by exact operators."""
        while node not in self.tensors:
            if node.target not in VIEWS and node not in self.moved:
                return None
            if node.target in CATS or not isinstance(node.args[0], Node):
                return None
            node = node.args[0]
        return node


def plan_graph(graph: Graph, mapping: SchemeMapping) -> Plan:
    """Return what the default recipe quantizes in a captured graph."""
    plan, layers = Plan(list(graph.nodes)), {}
    for node in graph.nodes:
        if node.target in LAYERS:
            layers[node] = _plan_layer(plan, node, mapping)
    _refuse_two_dtypes(plan)
    if any(scheme.is_fp8 for scheme in plan.reads.values()):
        # Kernels in FP8 are of linear layers alone. What writes a tensor rounds it to FP8.
        plan.tensors = {tensor: scheme for (_, tensor), scheme in plan.reads.items()}
    else:
        _spread_integers(plan, graph)
    plan.decisions = [_describe(plan, node, reason) for node, reason in layers.items()]
    return plan


def _spread_integers(plan: Plan, graph: Graph) -> None:
    """Quantize what layers read, and operators between them that run on integers."""
    for (user, tensor), scheme in list(plan.reads.items()):
        _request(plan, user, tensor, scheme)
    _quantize_pools_and_cats(plan)
    _merge_relus(plan)
    _quantize_projections(plan, graph)
    _read_quantized_operands(plan, graph)


def _refuse_two_dtypes(plan: Plan) -> None:
    """Raise `QuantizationError` if some activations would be integers and others in FP8."""
    if len({scheme.is_fp8 for scheme in plan.reads.values()}) > 1:
        raise QuantizationError(
            "activations in int8 or in FP8",
            "layers of both in one model",
            "Choose one dtype, weight_only=True for the layers in FP8, or None for some layers.",
        )


def _plan_layer(plan: Plan, node: Node, mapping: SchemeMapping) -> str:
    """Add the inputs and the weight of a layer to a plan; return why it stays float, "" if not."""
    scheme = mapping.scheme_of(node.meta[LAYER])
    if scheme is None:
        return "switched off by the configuration"
    if scheme.dynamic:
        return "its scheme is dynamic, and this model is quantized statically"
    weight = _weight_of(node)
    reason = _find_obstacle(node, weight) or (_why_no_fp8(node, weight) if scheme.is_fp8 else "")
    if reason:
        return reason
    if weight is not None:
        plan.weights.append(QuantizedWeight(node, *weight, scheme))
    for tensor in [] if scheme.weight_only else _activations_of(node, weight):
        plan.reads[node, tensor] = scheme
    return ""


def _why_no_fp8(node: Node, weight: tuple[int, int] | None) -> str:
    """Return why a layer has no kernel in FP8, "" if it has one."""
    value: Any = None if weight is None else node.args[weight[0]]
    limits = {
        "activations": node.target in MATMULS and weight is None,
        "embedding bag": node.target in EMBEDDING_BAGS,
        "convolution": node.target in WEIGHTED and node.target not in LINEARS,
        "no matrix": value is not None and value.meta["val"].dim() != 2,
        "factors": bool(node.kwargs),
    }
    return next((LIMITS[name] for name, applies in limits.items() if applies), "")


def _weight_of(node: Node) -> tuple[int, int] | None:
    """Return the argument of a layer's weight and its dimension of channels; None without one."""
    if node.target in MATMULS:
        second: Any = node.args[1]
        is_weight = second.op == "get_attr" and second.meta["val"].dim() == 2
        return (1, 1) if is_weight else None
    place: tuple[int, int] = (WEIGHTED | EMBEDDING_BAGS)[node.target]
    return place


def _activations_of(node: Node, weight: tuple[int, int] | None) -> list[Any]:
    if node.target in EMBEDDING_BAGS:
        return []
    arguments = node.args[:2] if node.target in MATMULS or weight == (1, 0) else node.args[:3]
    if node.target in WEIGHTED:
        arguments = (node.args[1 if weight == (2, 1) else 0],)
    return [a for i, a in enumerate(arguments) if node.target in WEIGHTED or not weight or i == 0]


def _find_obstacle(node: Node, weight: tuple[int, int] | None) -> str:
    """Return why a layer cannot be quantized, "" if it can."""
    if weight is not None and not is_constant(node.args[weight[0]]):
        return "its weight is computed from inputs of the model"
    tensors = [*_activations_of(node, weight), *([node.args[weight[0]]] if weight else [])]
    if not all(map(is_quantizable, tensors)):
        return "an input is no floating-point tensor, or another operator changes it in place"
    if node.target in MATMULS and all(map(is_constant, tensors)):
        return "all its inputs are parameters"
    return ""


def _request(plan: Plan, user: Node, tensor: Node, scheme: Scheme) -> None:
    """Let `user` read `tensor` quantized; quantize it, or what it is made of."""
    plan.reads[user, tensor] = scheme
    root, way = _find_source(plan, tensor)
    plan.tensors.setdefault(root, scheme)
    plan.moved.update(way)


def _find_source(plan: Plan, node: Node) -> tuple[Node, list[Node]]:
    """Return where the quantization of `node` moves to, and the operators on the way."""
    way: list[Node] = []
    while node not in plan.tensors and node.op == "call_function":
        is_exact = node.target in VIEWS or (is_exact_work(node) and _all_accept(plan, node))
        if not is_exact or not is_quantizable(node.args[0]):
            break
        way.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, way


def _all_accept(plan: Plan, node: Node) -> bool:
    """Return whether all that read `node` may read it quantized."""
    return all(_accepts(plan, user, node) for user in readers(node))


def _accepts(plan: Plan, user: Node, node: Node) -> bool:
    if (user, node) in plan.reads:
        return True
    if user.target in ADDS:
        return is_residual_operand(user, node)
    is_exact = user.target in VIEWS | RELUS | CATS | POOLS or is_exact_work(user)
    return is_exact and _all_accept(plan, user)


def _quantize_pools_and_cats(plan: Plan) -> None:
    """Quantize inputs of pools and concatenations that come from layers, if the output is."""
    pending = list(plan.tensors)
    while pending:
        node = pending.pop(0)
        scheme = plan.tensors.get(node)
        if scheme is None:
            continue
        inputs: list[Any] = []
        if node.target in POOLS and _comes_from_layer(plan, node.args[0]):
            inputs = [node.args[0]]
        if node.target in CATS and _share_scale(plan, node):
            inputs = list(node.args[0])  # type: ignore[arg-type]
        known = set(plan.tensors)
        for tensor in inputs:
            _request(plan, node, tensor, scheme)
        pending += [tensor for tensor in plan.tensors if tensor not in known]


def _comes_from_layer(plan: Plan, node: Any) -> bool:
    """Return whether a tensor is quantized anyway, or is a quantized layer's output."""
    if not is_quantizable(node):
        return False
    source, _ = _find_source(plan, node)
    layer = chain_layer(source)
    return source in plan.tensors or any(layer is user for user, _ in plan.reads)


def _share_scale(plan: Plan, cat: Node) -> bool:
    """Let all inputs of a concatenation have one scale, if no other concatenation has one of them.

    The concatenation then is exact, and its output is not quantized again.
    """
    inputs: Any = cat.args[0]
    if not all(_comes_from_layer(plan, tensor) for tensor in inputs):
        return False
    scheme = plan.tensors[cat]
    sources = [_find_source(plan, tensor)[0] for tensor in inputs]
    symmetric = {plan.tensors.get(source, scheme).symmetric for source in sources}
    groups = {plan.shared.get(source) for source in sources}
    if len(symmetric) > 1 or len(groups) > 1 or cat in sources:
        return False
    del plan.tensors[cat]
    plan.moved.add(cat)
    plan.shared |= dict.fromkeys(sources, next(iter(groups)) or sources[0])
    return True


def _merge_relus(plan: Plan) -> None:
    """Let a ReLU of a tensor that is quantized anyway run on the quantized values."""
    for node in [node for node in plan.tensors if node.target in RELUS]:
        tensor: Any = node.args[0]
        if plan.find_root(tensor) is not None and node not in plan.shared:
            scheme = plan.tensors.pop(node)
            plan.moved.add(node)
            plan.reads[node, tensor] = scheme


def _quantize_projections(plan: Plan, graph: Graph) -> None:
    """Quantize the second of two convolutions that are added, if their sum is quantized.

    A kernel computes the first with the sum. It would read the second in floating point, which is
    four times the memory of the sum.
    """
    quantized = {weight.layer for weight in plan.weights}
    for add in graph.nodes:
        sums = [add, *(user for user in add.users if user.target in RELUS)]
        scheme = next((plan.tensors[node] for node in sums if node in plan.tensors), None)
        if add.target not in ADDS or scheme is None:
            continue
        layers = [_only_layer(operand) for operand in add.args[:2]]
        if all(layer in quantized and _is_convolution(layer) for layer in layers):
            operand: Any = add.args[1]
            plan.tensors.setdefault(operand, scheme)
            plan.reads[add, operand] = plan.tensors[operand]


def _only_layer(operand: Any) -> Any:
    """Return the layer whose kernel writes `operand`, which one operator reads; None for others."""
    is_read_once = isinstance(operand, Node) and len(readers(operand)) == 1
    return chain_layer(operand) if is_read_once else None


def _is_convolution(layer: Any) -> bool:
    name: str = layer.meta[LAYER].operator
    return name.startswith("conv")


def _read_quantized_operands(plan: Plan, graph: Graph) -> None:
    """Let additions and concatenations read operands quantized that are quantized anyway."""
    for node in graph.nodes:
        if node.target in ADDS:
            operands = [a for a in node.args[:2] if isinstance(a, Node)]
            operands = [a for a in operands if _is_int8_operand(plan, node, a)]
        elif node.target in CATS and node in plan.tensors:
            operands = list(node.args[0])
        else:
            continue
        for tensor in operands:
            root = plan.find_root(tensor)
            if root is not None and root is not node:
                plan.reads[node, tensor] = plan.tensors[root]


def _is_int8_operand(plan: Plan, add: Node, operand: Node) -> bool:
    """Return whether an addition may read an operand quantized.

    It may beside a convolution; without a layer before it, if its own output is quantized.
    """
    others = [a for a in add.args[:2] if a is not operand]
    layers = [chain_layer(a) for a in others if isinstance(a, Node)]
    if chain_layer(operand) is not None and len(readers(operand)) == 1:
        return False
    if any(layer is not None for layer in layers):
        return is_residual_operand(add, operand)
    return add in plan.tensors or any(
        user in plan.tensors and user.target in RELUS for user in add.users
    )


def _describe(plan: Plan, node: Node, reason: str) -> LayerDecision:
    layer = node.meta[LAYER]
    decision = LayerDecision(layer.name, layer.operator, layer.module_path, not reason, reason)
    schemes = [each.scheme for each in plan.weights if each.layer is node]
    schemes += [scheme for (user, _), scheme in plan.reads.items() if user is node]
    roots = [plan.find_root(tensor) for user, tensor in plan.reads if user is node]
    inputs = tuple(root.meta[LAYER].name for root in roots if root is not None)
    weight = _weight_of(node)
    name, channels = _describe_weight(node, *weight) if weight else ("", None)
    outputs = [n.meta[LAYER].name for n in plan.tensors if chain_layer(n) is node]
    decision = replace(decision, inputs=inputs, output=outputs[0] if outputs else "")
    decision = replace(decision, kind=schemes[0].name if schemes else "")
    return replace(decision, weight=name, weight_channels=channels)


def _describe_weight(node: Node, argument: int, axis: int) -> tuple[str, int | None]:
    """Return the name of a layer's weight and its number of channels."""
    weight: Any = node.args[argument]
    return _parameter_name(weight), int(weight.meta["val"].shape[axis])


def _parameter_name(weight: Any) -> str:
    """Return the name of the parameter with most dimensions that a weight is computed from."""
    pending, parameters = [weight], []
    while pending:
        node = pending.pop(0)
        pending += node.all_input_nodes
        parameters += [node] if node.op == "get_attr" else []
    largest = max(parameters, key=lambda n: n.meta["val"].dim(), default=None)
    return str(largest.target) if largest is not None else ""

"""The reference graph: quantize and dequantize nodes at the tensors and weights of a plan.

Its form is what the backend's passes match. An activation has one `quantize_per_tensor.tensor` and
one `dequantize_per_tensor.tensor`, which all its readers share; scale and zero point are buffers.
A weight is quantized in the graph, from the parameter.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from ipex_inductor import compat
from ipex_inductor.quantization import fp8_graph
from ipex_inductor.quantization.bias_correction import correct_bias, is_corrected
from ipex_inductor.quantization.capture import LAYER, tensor_type
from ipex_inductor.quantization.operators import VIEWS
from ipex_inductor.quantization.recipe import Plan, QuantizedWeight
from ipex_inductor.quantization.scheme import MIN_SCALE, TensorScale

aten = torch.ops.aten
STEPS = 127.5  # of int8 weights from zero to the largest: half of -128...127, as torch.ao and IPEX


class ReferenceGraph:
    """Adds the nodes of a plan to a graph, and their buffers to a module.

    `nodes` maps nodes of the plan to those of the graph.
    """

    def __init__(self, graph: Graph, nodes: Mapping[Node, Node], buffers: nn.Module) -> None:
        self.graph, self.nodes, self.buffers = graph, nodes, buffers
        self.ops = compat.quantized_ops()
        self.values: dict[Node, Node] = {}  # dequantized form of a tensor; keys are of the plan
        self.count = 0  # of quantized tensors
        self.weights: dict[tuple[Node, int, bool, str], Node] = {}

    def build(
        self, plan: Plan, scales: Mapping[str, TensorScale], means: Mapping[str, torch.Tensor]
    ) -> None:
        """Quantize all tensors and weights of a plan; `means` are for bias correction."""
        alone = find_replaceable(plan)
        for tensor in plan.order:
            if tensor in plan.tensors:
                self._quantize_tensor(tensor, scales[tensor.meta[LAYER].name])
            if tensor in plan.moved:
                self._move(tensor, tensor in alone)
        for user, tensor in plan.reads:
            self._replace_input(self.nodes[user], tensor)
        for weight in plan.weights:
            self._quantize_weight(weight)
        observed = [w for w in plan.weights if w.layer.meta[LAYER].name in means]
        for number, weight in enumerate(w for w in observed if is_corrected(w)):
            layer = self.nodes[weight.layer]
            with self.graph.inserting_before(layer):
                mean = self._buffer(f"_ipex_mean_{number}", means[weight.layer.meta[LAYER].name])
            correct_bias(self.graph, layer, weight, mean)
        for tensor in reversed(plan.order):
            if tensor in plan.moved and not self.nodes[tensor].users:
                self.graph.erase_node(self.nodes[tensor])

    def _quantize_tensor(self, tensor: Node, scale: TensorScale) -> None:
        node, number = self.nodes[tensor], self.count
        self.count += 1
        before = _last_input(self.graph) if node.op == "placeholder" else node
        with self.graph.inserting_before(before.next):
            device = tensor.meta["val"].device
            step = torch.tensor(scale.scale, dtype=torch.float32, device=device)
            if scale.is_fp8:
                factor = self._buffer(f"_ipex_scale_{number}", step)
                quantized, value = fp8_graph.round_tensor(self.graph, node, factor)
                quantized.meta[LAYER] = value.meta[LAYER] = tensor.meta[LAYER]
                self.values[tensor] = value
                return
            zero = torch.tensor(scale.zero_point, dtype=torch.int32, device=device)
            factor = self._buffer(f"_ipex_scale_{number}", step)
            zero_point = self._buffer(f"_ipex_zero_point_{number}", zero)
            arguments = (factor, zero_point, *scale.bounds)
            target = self.ops.quantize_per_tensor.tensor
            quantized = self.graph.call_function(target, (node, *arguments))
            target = self.ops.dequantize_per_tensor.tensor
            value = self.graph.call_function(target, (quantized, *arguments), _output_type(tensor))
        quantized.meta[LAYER] = value.meta[LAYER] = tensor.meta[LAYER]
        self.values[tensor] = value

    def _buffer(self, name: str, value: torch.Tensor) -> Node:
        self.buffers.register_buffer(name, value, persistent=False)
        return self.graph.get_attr(name)

    def _move(self, tensor: Node, in_place: bool) -> None:
        """Let an exact operator, or a copy of it, run on quantized values."""
        node = self.nodes[tensor]
        if not in_place:
            with self.graph.inserting_after(node):
                node = self.graph.node_copy(node)
        for argument in tensor.all_input_nodes:
            self._replace_input(node, argument)
        self.values[tensor] = node

    def _replace_input(self, user: Node, tensor: Node) -> None:
        if tensor not in self.values:
            return
        addend = user.args[0] if user.target is aten.addmm.default else None
        user.replace_input_with(self.nodes[tensor], self.values[tensor])
        if addend is self.nodes[tensor]:  # it is added as it is, though it is multiplied too
            user.update_arg(0, addend)

    def _quantize_weight(self, weight: QuantizedWeight) -> None:
        layer, argument = self.nodes[weight.layer], weight.argument
        node: Any = layer.args[argument]
        scheme = weight.scheme
        key = (node, weight.axis, scheme.per_channel, scheme.name)
        if key not in self.weights:
            val = weight.layer.args[argument].meta["val"]  # type: ignore[union-attr]
            with self.graph.inserting_before(layer):
                if scheme.is_fp8:
                    dtype = val.dtype if scheme.weight_only else torch.float32
                    value = fp8_graph.round_weight(self.graph, node, weight.axis, dtype)
                else:
                    value = self._weight_value(node, val, weight)
                self.weights[key] = value
        layer.update_arg(argument, self.weights[key])
        if scheme.is_fp8 and not scheme.weight_only:
            fp8_graph.widen_layer(self.graph, layer, weight.layer.meta["val"].dtype)

    def _weight_value(self, node: Node, val: torch.Tensor, weight: QuantizedWeight) -> Node:
        """Return the dequantized form of a weight, whose scales are computed in the graph."""
        call, axis = self.graph.call_function, weight.axis
        dims = [d for d in range(val.dim()) if d != axis or not weight.scheme.per_channel]
        low_precision = val.dtype != torch.float32
        exact = call(aten.to.dtype, (node, torch.float32)) if low_precision else node
        largest = call(aten.amax.default, (call(aten.abs.default, (exact,)), dims))
        factor = call(aten.div.Tensor, (largest, STEPS))
        factor = call(aten.clamp_min.default, (factor, MIN_SCALE))
        if not weight.scheme.per_channel:
            factor = call(aten.expand.default, (factor, [val.shape[axis]]))
        zeros = call(aten.zeros_like.default, (factor,), {"dtype": torch.int64})
        arguments = (factor, zeros, axis, -128, 127, torch.int8)
        quantized = call(self.ops.quantize_per_channel.default, (node, *arguments))
        options: dict[str, Any] = {"out_dtype": val.dtype} if low_precision else {}
        dequantize = self.ops.dequantize_per_channel.default
        result: Node = call(dequantize, (quantized, *arguments), options)
        return result


def find_replaceable(plan: Plan) -> set[Node]:
    """Return the moved operators that run on quantized values alone, so need no copy."""
    result: set[Node] = set()
    for node in reversed(plan.order):
        if node in plan.moved and (
            node.target not in VIEWS
            or all(
                (user, node) in plan.reads or user in result or user.target is aten.sym_size.int
                for user in node.users
            )
        ):
            result.add(node)
    return result


def _last_input(graph: Graph) -> Node:
    nodes: list[Node] = list(graph.find_nodes(op="placeholder"))
    return nodes[-1]


def _output_type(tensor: Node) -> dict[str, Any]:
    dtype = tensor_type(tensor)
    return {} if dtype is torch.float32 else {"out_dtype": dtype}

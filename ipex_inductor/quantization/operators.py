"""Operators of captured graphs, by what quantization does with them."""

from typing import Any

import torch
from torch.fx import Node

from ipex_inductor.quantization.graphs.in_place import CHANGED

aten = torch.ops.aten

# Layers: argument of the weight, and dimension of the weight that has the output channels.
WEIGHTED: dict[Any, tuple[int, int]] = {
    aten.conv1d.default: (1, 0),
    aten.conv1d.padding: (1, 0),
    aten.conv2d.default: (1, 0),
    aten.conv2d.padding: (1, 0),
    aten.conv3d.default: (1, 0),
    aten.conv3d.padding: (1, 0),
    aten.conv_transpose1d.default: (1, 1),
    aten.conv_transpose2d.input: (1, 1),
    aten.conv_transpose3d.input: (1, 1),
    aten.linear.default: (1, 0),
    aten.addmm.default: (2, 1),
}
# Layers whose weight alone is quantized: the inputs are indices.
EMBEDDING_BAGS = {aten.embedding_bag.default: (0, 0), aten.embedding_bag.padding_idx: (0, 0)}
LINEARS = {aten.linear.default, aten.addmm.default}
MATMULS = {aten.matmul.default, aten.mm.default, aten.bmm.default}
LAYERS = {*WEIGHTED, *EMBEDDING_BAGS, *MATMULS}

# Operators that move elements, or drop some: exact on quantized values, and free to repeat.
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.movedim.int,
    aten.swapaxes.default,
    aten.alias.default,
    aten.detach.default,
}
# Exact on quantized values, but work: one copy runs, on quantized values or not.
EXACT_WORK = {
    aten.contiguous.default,
    aten.clone.default,
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.upsample_nearest1d.vec,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest3d.vec,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten.pixel_shuffle.default,
    aten.channel_shuffle.default,
}
RELUS = {aten.relu.default}
CATS = {aten.cat.default, aten.concat.default, aten.concatenate.default}
# Quantized on both sides where quantized layers are on both sides.
POOLS = {
    aten.avg_pool1d.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
}
ADDS = {aten.add.Tensor}
# Run in the kernel of the layer before them, in floating point.
ACTIVATIONS = {
    *RELUS,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.hardswish.default,
    aten.hardsigmoid.default,
    aten.leaky_relu.default,
    aten.silu.default,
    aten.gelu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.elu.default,
    aten.mish.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.abs.default,
    aten.sqrt.default,
    aten.square.default,
}
FLOATS = {torch.float32, torch.bfloat16, torch.float16}


def is_constant(node: Any) -> bool:
    """Return whether a node's value depends on parameters and buffers alone."""
    pending, visited = [node], set()
    while pending:
        current = pending.pop()
        if current in visited:
            continue
        visited.add(current)
        if current.op in ("placeholder", "call_module", "call_method"):
            return False
        if current.op == "call_function" and _is_random(current):
            return False
        pending += current.all_input_nodes
    return True


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_exact_work(node: Node) -> bool:
    """Return whether a node is work that is exact on quantized values.

    Padding is if it repeats elements, or adds zeros.
    """
    if node.target is aten.constant_pad_nd.default:
        return not any(node.args[2:])
    if node.target is aten.pad.default:
        return not any(node.args[3:]) or node.args[2] != "constant"
    return node.target in EXACT_WORK


def readers(node: Node) -> list[Node]:
    """Return the users of a node that read its values, not only a size."""
    return [user for user in node.users if user.target is not aten.sym_size.int]


def is_quantizable(node: Any) -> bool:
    """Return whether a node's value is a floating-point tensor that no operator changes."""
    if not isinstance(node, Node) or node.meta.get(CHANGED):
        return False
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS

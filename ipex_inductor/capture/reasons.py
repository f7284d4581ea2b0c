"""Reasons why a graph, or the results of a call, must not be captured; "" if they may be."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ipex_inductor import compat

Node = torch.fx.Node

# Namespaces of ops that only compute, on the device of their inputs.
KNOWN = ("aten", "prims", "prim", "inductor_prims", "ipex")
KINDS = {"cuda"}  # supported device types
PLAIN = (operator.getitem,)
CHANCES = ("dropout_p", "p")  # probabilities; at 0 the op draws no random numbers


def inputs_read(
    gm: torch.fx.GraphModule, static: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of inputs that a graph reads: the `static` ones, and all others."""
    placeholders, stay = gm.graph.find_nodes(op="placeholder"), set(static)
    read = [i for i, node in enumerate(placeholders) if node.users]
    return tuple(i for i in read if i in stay), tuple(i for i in read if i not in stay)


def why_not(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], moving: Iterable[int]) -> str:
    """Return why a graph must not be captured, judged before Inductor compiles it; "" if it may.

    Args:
        gm: the graph.
        example_inputs: its inputs.
        moving: indices of the inputs that are no weights.
    """
    if not example_inputs:
        return "it has no inputs"
    if not all(isinstance(value, torch.Tensor) for value in example_inputs):
        return "a size or number among the inputs varies"
    if any(compat.sizes(value) != compat.hints(value) for value in example_inputs):
        return "a size varies"
    devices = {value.device for value in example_inputs}
    devices |= {device for node in gm.graph.nodes for device in _devices(node)}
    if len(devices) != 1:
        return f"it is on several devices: {', '.join(sorted(map(str, devices)))}"
    if overlapping := [i for i in moving if overlaps(example_inputs[i])]:
        return f"input {overlapping[0]} overlaps itself"
    if node := compat.uncapturable(gm):
        return f"torch cannot capture {_name(node)}"
    placeholders = gm.graph.find_nodes(op="placeholder")
    return _why_no_ops(gm, {placeholders[i] for i in moving})


def _why_no_ops(gm: torch.fx.GraphModule, moving: set[Node]) -> str:
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr" and not isinstance(getattr(gm, node.target), torch.Tensor):
            return f"it contains a graph of its own, {node.target}"
        if node.op == "call_function" and not _is_known(node.target):
            return f"the effects of {_name(node)} are not known"
        if _is_random(node):
            return f"{_name(node)} draws random numbers"
        if "as_strided" in _name(node) and _base_of(node.args[0]) in moving:
            return f"{_name(node)} may read memory beyond an input's elements"
    return ""


def why_not_code(code: Any) -> str:
    """Return why the code that Inductor generated must not be captured, "" if it may."""
    reason = getattr(code, "disabled_cudagraphs_reason", None)
    if reason:
        return str(reason).split("\n")[0]
    kinds = set(code.device_types) - {"meta"}
    if not kinds <= KINDS or len(code.device_idxs) > 1:
        return f"its code runs on {', '.join(sorted(kinds))}"
    return ""


def why_not_results(results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> str:
    """Return why a call must not be captured, judged by its results; "" if it may.

    Each result must have memory of its own, which can be copied.
    """
    tensors = [value for value in results if isinstance(value, torch.Tensor)]
    if any(value.layout != torch.strided or type(value) is not torch.Tensor for value in tensors):
        return "a result is not a plain tensor"
    if any(value.device != inputs[0].device for value in tensors):
        return "a result is on another device"
    if any(map(overlaps, tensors)):
        return "a result overlaps itself"
    owners = [value.untyped_storage()._cdata for value in tensors]
    if len(set(owners)) < len(owners):
        return "two results share their memory"
    if not {value.untyped_storage()._cdata for value in inputs}.isdisjoint(owners):
        return "a result is an input, or a view of one"
    return ""


def overlaps(value: torch.Tensor) -> bool:
    """Return True if two elements may share an address, by sizes and strides."""
    needed = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < needed:
                return value.numel() > 0
            needed = stride * (size - 1) + needed
    return False


def _devices(node: Node) -> set[torch.device]:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return {v.device for v in leaves if isinstance(v, torch.Tensor) and v.device.type != "meta"}


def _is_known(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in KNOWN
    return target in PLAIN


def _is_random(node: Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments: dict[str, Any] = dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments |= dict(zip(names, node.args, strict=False))
    defaults = {a.name: a.default_value for a in node.target._schema.arguments}  # type: ignore[union-attr]
    chances = [arguments.get(name, defaults[name]) for name in CHANCES if name in defaults]
    return chances != [0.0]


def _base_of(value: Any) -> Any:
    """Return the base of a view, through all views before it."""
    while value.op == "call_function" and isinstance(value.target, torch._ops.OpOverload):
        arguments = value.target._schema.arguments
        if not arguments or arguments[0].alias_info is None:
            break
        value = value.args[0]
    return value


def _name(node: Node) -> str:
    return str(node.target)

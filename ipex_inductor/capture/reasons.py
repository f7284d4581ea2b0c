"""Why a graph, or what a call of it gave, must not be captured; "" where it may be."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ipex_inductor import compat

Node = torch.fx.Node

# Ops of which we know that they do nothing but compute, on the device where their inputs are.
KNOWN = ("aten", "prims", "prim", "inductor_prims", "ipex")
KINDS = {"cuda"}  # of devices
PLAIN = (operator.getitem,)
CHANCES = ("dropout_p", "p")  # an op that may draw random numbers draws none where this is 0


def inputs_read(
    gm: torch.fx.GraphModule, static: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the inputs that a graph reads: those that are `static`, and the others."""
    placeholders, stay = gm.graph.find_nodes(op="placeholder"), set(static)
    read = [i for i, node in enumerate(placeholders) if node.users]
    return tuple(i for i in read if i in stay), tuple(i for i in read if i not in stay)


def why_not(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], moving: Iterable[int]) -> str:
    """As the graph that goes to Inductor tells it; `moving`: the inputs that are no weights."""
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
        return f"torch captures no {_name(node)}"
    placeholders = gm.graph.find_nodes(op="placeholder")
    return _why_no_ops(gm, {placeholders[i] for i in moving})


def _why_no_ops(gm: torch.fx.GraphModule, moving: set[Node]) -> str:
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr" and not isinstance(getattr(gm, node.target), torch.Tensor):
            return f"it has a graph of its own, {node.target}"
        if node.op == "call_function" and not _is_known(node.target):
            return f"nothing is known of {_name(node)}"
        if _is_random(node):
            return f"{_name(node)} draws random numbers"
        if "as_strided" in _name(node) and _viewed(node.args[0]) in moving:
            return f"{_name(node)} reads what may lie beside an input"
    return ""


def why_not_code(code: Any) -> str:
    """As Inductor tells of the code that it made."""
    reason = getattr(code, "disabled_cudagraphs_reason", None)
    if reason:
        return str(reason).split("\n")[0]
    kinds = set(code.device_types) - {"meta"}
    if not kinds <= KINDS or len(code.device_idxs) > 1:
        return f"its code runs on {', '.join(sorted(kinds))}"
    return ""


def why_not_results(results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> str:
    """As one call tells: each result must be memory of its own, which can be copied."""
    tensors = [value for value in results if isinstance(value, torch.Tensor)]
    if any(value.layout != torch.strided or type(value) is not torch.Tensor for value in tensors):
        return "a result is no plain tensor"
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
    """Whether two of its elements may lie at one address, by sizes and strides."""
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
    given: dict[str, Any] = dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given |= dict(zip(names, node.args, strict=False))
    defaults = {a.name: a.default_value for a in node.target._schema.arguments}  # type: ignore[union-attr]
    chances = [given.get(name, defaults[name]) for name in CHANCES if name in defaults]
    return chances != [0.0]


def _viewed(value: Any) -> Any:
    """What a view is of, through all views before it."""
    while value.op == "call_function" and isinstance(value.target, torch._ops.OpOverload):
        arguments = value.target._schema.arguments
        if not arguments or arguments[0].alias_info is None:
            break
        value = value.args[0]
    return value


def _name(node: Node) -> str:
    return str(node.target)

"""Helpers for rules on attention calls in Dynamo's graph, which writes to tensors in place."""

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ipex_inductor.passes.attention.fused_kernels import Kernels
from ipex_inductor.passes.engine.literals import Refused, example
from ipex_inductor.passes.engine.source import ATTEND, user_line
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
T = TypeVar("T")

# Functions that write to their first argument have these names, or a trailing "_" as methods do.
PYTHONS = frozenset(dir(operator))  # iadd, and_ ...
WRITERS = {"setitem"} | {n for n in PYTHONS if n[0] == "i" and PYTHONS & {n[1:], f"{n[1:]}_"}}
# All other functions of these modules write only with `out=` or `inplace=`.
WITHOUT_WRITERS = ("torch", "_operator", "operator", "builtins", "math")
_NOBODY = nullcontext()
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def arguments(attention: Node) -> dict[str, Any]:
    """Return the arguments of a call of torch's attention by name."""
    return dict(zip(ARGUMENTS, attention.args, strict=False)) | attention.kwargs


def try_rule(
    rule: str, find: Callable[[Node], T | None], node: Node, report: GraphReport
) -> T | None:
    """Return what `find` returns for a call, None if it raises; report its text or the reason.

    Args:
        rule: The rule's name in the report.
        find: Returns a match of the rule, None if there is none; raises `Refused` with a reason.
        node: The call.
        report: Gets the decision.
    """
    try:
        match = find(node)
    except Refused as refused:
        report.add("missed", rule, str(refused), user_line(node))
        return None
    except Exception as error:  # one failing rule must not disable the others
        report.add("missed", rule, f"{type(error).__name__}: {error}", user_line(node))
        return None
    if match is not None:
        report.add("fired", rule, str(match), user_line(node))
        counters["ipex"][rule] += 1
    return match


def compute_fake_attention(
    call: Mapping[str, Any], seen_by: AbstractContextManager[Any] = _NOBODY
) -> Tensor:
    """Return the fake result of torch's attention. Raises `Refused` where torch has none."""
    try:
        with unset_fake_temporarily(), call["query"].fake_mode, seen_by:
            # `seen_by` is innermost, so that no call is answered from fake tensors' cache.
            return ATTEND(**call)
    except Exception as error:
        raise Refused(f"torch's attention rejects the call: {error}") from error


def is_fused(call: Mapping[str, Any]) -> bool:
    """Return whether torch has a fused kernel for a call with these fake arguments."""
    kernels = Kernels()  # type: ignore[no-untyped-call]
    compute_fake_attention(call, kernels)
    return kernels.fused


def may_be_written(since: Node, until: Node) -> bool:
    """Return whether a node between two nodes may write to a tensor."""
    node = since.next
    while node is not until:
        if node.op != "root" and _may_write(node):
            return True
        node = node.next
    return False


def _may_write(node: Node) -> bool:
    """Return whether a node may write to a tensor; functions outside torch and Python may."""
    target: Any = node.target
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or target.namespace not in ("aten", "prims")
    if isinstance(target, (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)):
        return True
    if node.op == "call_method":
        name, module = str(target), "torch"
    else:
        name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    is_out = "out" in node.kwargs or node.kwargs.get("inplace")
    if module == "torch.nn.functional":  # `inplace` may be positional
        is_out = is_out or any(argument is True for argument in node.args)
    plain = name[2:-2] if name.startswith("__") else name
    writes = plain in WRITERS or (plain.endswith("_") and name not in PYTHONS)
    is_pure_module = node.op == "call_method" or module.split(".")[0] in WITHOUT_WRITERS
    return bool(is_out or writes or not is_pure_module or not name)


def methods(node: Node, calls: Iterable[tuple[Any, ...]]) -> Node:
    """Insert a chain of method calls on `node`; return the last one.

    Each call is a method's name and its arguments. The nodes stand at the graph's insertion point
    and carry the fake tensors that they return.
    """
    for call in calls:
        name, *args = call
        value, meta = apply_methods(example(node), [call]), node.meta
        node = node.graph.call_method(name, (node, *args))
        node.meta = {**meta, "example_value": value}
    return node


def apply_methods(value: Tensor, calls: Iterable[tuple[Any, ...]]) -> Tensor:
    """Return the tensor after a chain of method calls."""
    for name, *args in calls:
        value = getattr(value, name)(*args)
    return value

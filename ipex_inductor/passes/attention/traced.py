"""Dynamo's graph, which writes to tensors in place: rules on attention's calls, who may write."""

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

# What writes to its first argument is called so, or like a method with "_" behind.
PYTHONS = frozenset(dir(operator))  # iadd, and_ ...
WRITERS = {"setitem"} | {n for n in PYTHONS if n[0] == "i" and PYTHONS & {n[1:], f"{n[1:]}_"}}
# All else of these modules writes only where it is told to.
WITHOUT_WRITERS = ("torch", "_operator", "operator", "builtins", "math")
_NOBODY = nullcontext()
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def arguments(attention: Node) -> dict[str, Any]:
    """What a call of torch's attention is given, by name."""
    return dict(zip(ARGUMENTS, attention.args, strict=False)) | attention.kwargs


def tried(rule: str, find: Callable[[Node], T | None], node: Node, report: GraphReport) -> T | None:
    """What `find` makes of a call, whose text is said in the report; raises nothing."""
    try:
        found = find(node)
    except Refused as refused:
        report.add("missed", rule, str(refused), user_line(node))
        return None
    except Exception as error:  # no attention is worth all the other rules
        report.add("missed", rule, f"{type(error).__name__}: {error}", user_line(node))
        return None
    if found is not None:
        report.add("fired", rule, str(found), user_line(node))
        counters["ipex"][rule] += 1
    return found


def attended(given: Mapping[str, Any], seen_by: AbstractContextManager[Any] = _NOBODY) -> Tensor:
    """The fake result of torch's attention. Raises `Refused` where torch has none."""
    try:
        with unset_fake_temporarily(), given["query"].fake_mode, seen_by:
            # `seen_by` is innermost, so that no call is answered from fake tensors' cache.
            return ATTEND(**given)
    except Exception as error:
        raise Refused(f"torch's attention does not take it so: {error}") from error


def is_fused(given: Mapping[str, Any]) -> bool:
    """Whether torch has a kernel for it."""
    kernels = Kernels()  # type: ignore[no-untyped-call]
    attended(given, kernels)
    return kernels.fused


def may_be_written(since: Node, until: Node) -> bool:
    """Whether anything between two nodes may write to a tensor."""
    node = since.next
    while node is not until:
        if node.op != "root" and _may_write(node):
            return True
        node = node.next
    return False


def _may_write(node: Node) -> bool:
    """Whether a node may write to a tensor; what is not torch's or Python's own may."""
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
    told = "out" in node.kwargs or node.kwargs.get("inplace")
    if module == "torch.nn.functional":  # by its place
        told = told or any(argument is True for argument in node.args)
    plain = name[2:-2] if name.startswith("__") else name
    writes = plain in WRITERS or (plain.endswith("_") and name not in PYTHONS)
    known = node.op == "call_method" or module.split(".")[0] in WITHOUT_WRITERS
    return bool(told or writes or not known or not name)


def methods(node: Node, calls: Iterable[tuple[Any, ...]]) -> Node:
    """The last of new nodes that call these methods, a name and its arguments each, from `node` on.

    They stand where the graph is told to insert, and have the fake tensors that they make.
    """
    for call in calls:
        name, *given = call
        value, meta = after(example(node), [call]), node.meta
        node = node.graph.call_method(name, (node, *given))
        node.meta = {**meta, "example_value": value}
    return node


def after(value: Tensor, calls: Iterable[tuple[Any, ...]]) -> Tensor:
    """What those methods make of a tensor."""
    for name, *given in calls:
        value = getattr(value, name)(*given)
    return value

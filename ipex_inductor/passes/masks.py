"""Masks of attention: what constants say is dropped, or said as causal; others lie as kernels ask.

Read from Dynamo's graph: AOT autograd takes attention apart by the device, and whether a GPU has a
fused kernel for it, forward and backward, may hang on the mask. What masks hold that come of
inputs, or of sizes that vary, is not known. Attention by hand is for `scores`.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg

from ipex_inductor.decisions import GraphReport
from ipex_inductor.passes.fused_kernels import Kernels, lies_apart, side_by_side
from ipex_inductor.passes.literals import Refused, example, value
from ipex_inductor.passes.source import ATTEND, attentions, user_line

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "constant-mask"
LAYOUT = "mask-layout"
# What writes to its first argument is called so, or like a method with "_" behind.
PYTHONS = frozenset(dir(operator))  # iadd, and_ ...
WRITERS = {"setitem"} | {n for n in PYTHONS if n[0] == "i" and PYTHONS & {n[1:], f"{n[1:]}_"}}
# All else of these modules writes only where it is told to.
WITHOUT_WRITERS = ("torch", "_operator", "operator", "builtins", "math")
WHERE = (torch.where, aten.where.self)
NAMES = frozenset({NAME, LAYOUT})
OTHER_NUMBERS = "another kernel would drop other numbers (fallback_random)"
_NOBODY = nullcontext()
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Change(Enum):
    """What becomes of a call's mask."""

    DROPPED = "it hides nothing"
    CAUSAL = "is_causal says the same"
    COPIED = "copied: torch has no fused kernel for a mask whose columns lie apart"


def found(
    graph: torch.fx.Graph,
    dropout_as_eager: bool,
    report: GraphReport,
    off: Collection[str] = (),
) -> dict[str, Change]:
    """The calls, by name, whose mask is better dropped or copied.

    `dropout_as_eager`: the very numbers are to be dropped that eager drops. `off`: rules that are.
    Says of each call what became of its mask.
    """
    known: dict[Node, Tensor] = {}
    rules = {
        NAME: lambda node: _constant(node, dropout_as_eager, known),
        LAYOUT: lambda node: _apart(node, dropout_as_eager),
    }
    on = {name: rule for name, rule in rules.items() if not {"*", name} & {*off}}
    calls: dict[str, Change] = {}
    for node in attentions(graph):
        for name, rule in on.items():
            if node.name not in calls:
                change = _tried(name, rule, node, report)
                calls |= {node.name: change} if change else {}
    return calls


def _tried(
    name: str, rule: Callable[[Node], "Change | None"], node: Node, report: GraphReport
) -> Change | None:
    """What a rule makes of a call, said in the report."""
    try:
        change = rule(node)
    except Refused as refused:
        report.add("missed", name, str(refused), user_line(node))
        return None
    except Exception as error:  # no mask is worth all the other rules
        report.add("missed", name, f"{type(error).__name__}: {error}", user_line(node))
        return None
    if change is not None:
        report.add("fired", name, change.value, user_line(node))
        counters["ipex"][name] += 1
    return change


def change(graph: torch.fx.Graph, calls: Mapping[str, Change]) -> None:
    """Rewrite the calls that `found` named; a result that somebody sees lies as it did."""
    places = {node: number for number, node in enumerate(graph.nodes)}
    copies: dict[Node, Node] = {}  # layers that read the same mask share its copy
    for node in sorted((n for n in attentions(graph) if n.name in calls), key=places.__getitem__):
        call, after = _changed(node, calls[node.name]), _attended(node, calls[node.name])
        if calls[node.name] is Change.COPIED:
            mask = call["attn_mask"]
            if mask not in copies or _may_be_written(copies[mask], node):
                copies[mask] = _copied(graph, mask, node)
            call["attn_mask"] = copies[mask]
        node.args, node.kwargs = (), call
        if after.stride() != example(node).stride() and not _is_copied(node, after):
            with graph.inserting_after(node):
                copy = graph.call_method("contiguous", (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy)
            copy.args = (node,)


def _copied(graph: torch.fx.Graph, mask: Node, reader: Node) -> Node:
    """A node before that of who reads a mask, as it is then, with its columns side by side."""
    last = mask

    def call(method: str, *arguments: int) -> Node:
        nonlocal last
        value = getattr(example(last), method)(*arguments)
        with graph.inserting_before(reader):
            last = graph.call_method(method, (last, *arguments))
        last.meta = {**mask.meta, "example_value": value}
        return last

    copy: Node = side_by_side(example(mask), call)
    return copy


def _may_be_written(since: Node, until: Node) -> bool:
    """Whether anything between two nodes may write to a tensor: graphs of Dynamo's do."""
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


def _constant(node: Node, dropout_as_eager: bool, known: dict[Node, Tensor]) -> Change:
    """What constants say that the mask is. Raises `Refused`."""
    call = _bound(node)
    query, key, mask = (example(call[name]) for name in ("query", "key", "attn_mask"))
    if call.get("is_causal"):
        raise Refused("a mask beside is_causal is an error")
    if call.get("dropout_p") and dropout_as_eager:
        raise Refused(OTHER_NUMBERS)
    constant = value(call["attn_mask"], known)
    scores = (*query.shape[:-1], key.shape[-2])
    if any(isinstance(size, torch.SymInt) for size in scores):
        raise Refused("sizes vary")
    if not _broadcasts(mask.shape, scores):
        raise Refused("the mask has dimensions that the query has not")
    causal = not _hides_nothing(constant)
    if causal and not (scores[-2] == scores[-1] and _is_triangle(constant, scores[-1])):
        raise Refused("it hides something else than what follows")
    change = Change.CAUSAL if causal else Change.DROPPED
    _check_layout(node, change)
    return change


def _apart(node: Node, dropout_as_eager: bool) -> Change | None:
    """Whether a copy of the mask gets it a kernel. Raises `Refused` where it may not be copied."""
    call = _bound(node)
    mask = example(call["attn_mask"])
    if call.get("is_causal") or not lies_apart(mask):
        return None
    if _is_fused(node, None) or not _is_fused(node, Change.COPIED):
        return None
    if mask.requires_grad and torch.is_grad_enabled():
        raise Refused("the mask is to get a gradient")
    if call.get("dropout_p") and dropout_as_eager:
        raise Refused(OTHER_NUMBERS)
    _check_layout(node, Change.COPIED)
    return Change.COPIED


def _check_layout(node: Node, change: Change) -> None:
    after = _attended(node, change)
    if after.shape != example(node).shape:
        raise Refused("the result has the mask's sizes")
    if after.stride() != example(node).stride() and not example(node).is_contiguous():
        raise Refused("the result would lie otherwise in memory")


def _bound(node: Node) -> dict[str, Any]:
    return dict(zip(ARGUMENTS, node.args, strict=False)) | node.kwargs


def _changed(node: Node, change: Change) -> dict[str, Any]:
    """The arguments of a call, by name, with what is to be copied as its mask."""
    call = _bound(node)
    if change is Change.COPIED:
        return call | {"attn_mask": _bare(call["attn_mask"], node)}
    kept = {name: given for name, given in call.items() if name != "attn_mask"}
    return kept | {"is_causal": change is Change.CAUSAL}


def _attended(
    node: Node, change: Change | None, seen_by: AbstractContextManager[Any] = _NOBODY
) -> Tensor:
    """The fake result of a call as it is, or changed. Raises `Refused` where torch has none."""
    call = _changed(node, change) if change else _bound(node)
    given = {name: map_arg(argument, example) for name, argument in call.items()}
    try:
        with unset_fake_temporarily(), given["query"].fake_mode:
            if change is Change.COPIED:
                given["attn_mask"] = side_by_side(given["attn_mask"])
            with seen_by:  # innermost, so that no call is answered from fake tensors' cache
                result: Tensor = ATTEND(**given)
    except Exception as error:
        raise Refused(f"torch's attention does not take it so: {error}") from error
    return result


def _bare(mask: Node, reader: Node) -> Node:
    """What a mask is where a condition that constants say leaves all of it as it was.

    T5's bias is filled where a mask hides it, which makes one for each row of the batch.
    """
    if mask.target not in WHERE or len(mask.args) != 3:
        return mask
    condition, kept, _ = mask.args
    if not isinstance(condition, Node) or not isinstance(kept, Node):
        return mask
    same = example(kept).dtype == example(mask).dtype and example(kept).dim() == 4
    if not same or _may_be_written(kept, reader):
        return mask
    try:
        return _bare(kept, reader) if bool(value(condition, {}).all()) else mask
    except Refused:
        return mask


def _is_fused(node: Node, change: Change | None) -> bool:
    kernels = Kernels()  # type: ignore[no-untyped-call]
    _attended(node, change, kernels)
    return kernels.fused


def _broadcasts(shape: torch.Size, scores: tuple[int, ...]) -> bool:
    """Whether a mask of `shape` leaves scores of theirs."""
    pairs = zip(reversed(shape), reversed(scores), strict=False)
    return len(shape) <= len(scores) and all(size in (1, whole) for size, whole in pairs)


def _hides_nothing(mask: Tensor) -> bool:
    return bool((mask if mask.dtype is torch.bool else mask == 0).all())


def _is_triangle(mask: Tensor, keys: int) -> bool:
    """Whether row i sees all up to column i, as it is, and nothing behind."""
    seen = torch.ones(keys, keys, dtype=torch.bool).tril()
    if mask.dtype is torch.bool:
        return bool((mask == seen).all())
    return bool((mask == torch.where(seen, 0.0, float("-inf"))).all())


def _is_copied(node: Node, after: Tensor) -> bool:
    """Whether all that is done with the result is to swap heads and rows, and copy that.

    Then nothing sees how it lies; as `after` lies there is nothing to copy.
    """
    swap, copy = _only_user(node), _only_user(_only_user(node))
    return (
        swap is not None
        and swap.target in ("transpose", torch.transpose, aten.transpose.int)
        and swap.args[1:] == (1, 2)
        and copy is not None
        and copy.target in ("contiguous", "reshape", aten.contiguous.default, aten.reshape.default)
        and not copy.kwargs
        and bool(example(copy).is_contiguous())
        and after.transpose(1, 2).is_contiguous()
    )


def _only_user(node: Node | None) -> Node | None:
    users = list(node.users) if node else []
    return users[0] if len(users) == 1 else None

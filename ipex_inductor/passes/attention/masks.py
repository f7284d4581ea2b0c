"""Masks of attention: what constants say is dropped, or said as causal; others lie as kernels ask.

Read from Dynamo's graph: AOT autograd takes attention apart by the device, and whether a GPU has a
fused kernel for it, forward and backward, may hang on the mask. What masks hold that come of
inputs, or of sizes that vary, is not known. Attention by hand is for `scores`.
"""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

from ipex_inductor.passes.attention.fused_kernels import (
    lies_apart,
    side_by_side,
    side_by_side_calls,
)
from ipex_inductor.passes.attention.traced import (
    arguments,
    attended,
    is_fused,
    may_be_written,
    methods,
    tried,
)
from ipex_inductor.passes.engine.literals import Refused, example, value
from ipex_inductor.passes.engine.source import attentions
from ipex_inductor.reporting.decisions import GraphReport

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "constant-mask"
LAYOUT = "mask-layout"
WHERE = (torch.where, aten.where.self)
NAMES = frozenset({NAME, LAYOUT})
OTHER_NUMBERS = "another kernel would drop other numbers (fallback_random)"


class Change(Enum):
    """What becomes of a call's mask."""

    DROPPED = "it hides nothing"
    CAUSAL = "is_causal says the same"
    COPIED = "copied: torch has no fused kernel for a mask whose columns lie apart"

    def __str__(self) -> str:
        return self.value


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
    for node in filter(_is_masked, attentions(graph)):
        for name, rule in on.items():
            if node.name not in calls:
                change = tried(name, rule, node, report)
                calls |= {node.name: change} if change else {}
    return calls


def _is_masked(attention: Node) -> bool:
    return isinstance(arguments(attention).get("attn_mask"), Node)


def change(graph: torch.fx.Graph, calls: Mapping[str, Change]) -> None:
    """Rewrite the calls that `found` named; a result that somebody sees lies as it did."""
    places = {node: number for number, node in enumerate(graph.nodes)}
    copies: dict[Node, Node] = {}  # layers that read the same mask share its copy
    for node in sorted((n for n in attentions(graph) if n.name in calls), key=places.__getitem__):
        call, after = _changed(node, calls[node.name]), _attended(node, calls[node.name])
        if calls[node.name] is Change.COPIED:
            mask = call["attn_mask"]
            if mask not in copies or may_be_written(copies[mask], node):
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
    with graph.inserting_before(reader):
        return methods(mask, side_by_side_calls(example(mask)))


def _constant(node: Node, dropout_as_eager: bool, known: dict[Node, Tensor]) -> Change:
    """What constants say that the mask is. Raises `Refused`."""
    call = arguments(node)
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
    call = arguments(node)
    mask = example(call["attn_mask"])
    if call.get("is_causal") or not lies_apart(mask):
        return None
    if is_fused(_given(node, None)) or not is_fused(_given(node, Change.COPIED)):
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


def _changed(node: Node, change: Change) -> dict[str, Any]:
    """The arguments of a call, by name, with what is to be copied as its mask."""
    call = arguments(node)
    if change is Change.COPIED:
        return call | {"attn_mask": _bare(call["attn_mask"], node)}
    kept = {name: given for name, given in call.items() if name != "attn_mask"}
    return kept | {"is_causal": change is Change.CAUSAL}


def _given(node: Node, change: Change | None) -> dict[str, Any]:
    """The fake arguments of a call as it is, or changed."""
    call = _changed(node, change) if change else arguments(node)
    given = {name: map_arg(argument, example) for name, argument in call.items()}
    if change is Change.COPIED:
        given["attn_mask"] = side_by_side(given["attn_mask"])
    return given


def _attended(node: Node, change: Change) -> Tensor:
    """The fake result of a call that was changed. Raises `Refused` where torch has none."""
    return attended(_given(node, change))


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
    if not same or may_be_written(kept, reader):
        return mask
    try:
        return _bare(kept, reader) if bool(value(condition, {}).all()) else mask
    except Refused:
        return mask


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

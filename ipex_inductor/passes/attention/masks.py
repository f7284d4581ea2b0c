"""Drop masks of attention that hide nothing, mark causal ones, and copy masks into kernels' layout.

The pass reads Dynamo's graph: AOT autograd decomposes attention by the device, and whether a GPU
has a fused kernel for it, forward and backward, may depend on the mask. Masks computed from inputs
or from sizes that vary are not known. Handwritten attention is read by `scores`.
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
    compute_fake_attention,
    is_fused,
    may_be_written,
    methods,
    try_rule,
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
    """A change of a call's mask."""

    DROPPED = "it hides nothing"
    CAUSAL = "is_causal says the same"
    COPIED = "copied: torch has no fused kernel for a mask whose columns lie apart"

    def __str__(self) -> str:
        return self.value


def find_changes(
    graph: torch.fx.Graph,
    dropout_as_eager: bool,
    report: GraphReport,
    off: Collection[str] = (),
) -> dict[str, Change]:
    """Return the calls, by name, whose mask is better dropped or copied; report each of them.

    Args:
        dropout_as_eager: Whether dropout must drop the very elements that eager drops.
        off: Names of rules that are off; "*" for all.
    """
    constants: dict[Node, Tensor] = {}
    rules = {
        NAME: lambda node: _constant(node, dropout_as_eager, constants),
        LAYOUT: lambda node: _judge_layout(node, dropout_as_eager),
    }
    on = {name: rule for name, rule in rules.items() if not {"*", name} & {*off}}
    calls: dict[str, Change] = {}
    for node in filter(_is_masked, attentions(graph)):
        for name, rule in on.items():
            if node.name not in calls:
                change = try_rule(name, rule, node, report)
                calls |= {node.name: change} if change else {}
    return calls


def _is_masked(attention: Node) -> bool:
    return isinstance(arguments(attention).get("attn_mask"), Node)


def change(graph: torch.fx.Graph, calls: Mapping[str, Change]) -> None:
    """Rewrite the calls that `find_changes` named; a result whose strides are seen keeps them."""
    positions = {node: number for number, node in enumerate(graph.nodes)}
    copies: dict[Node, Node] = {}  # layers that read the same mask share its copy
    for node in sorted(
        (n for n in attentions(graph) if n.name in calls), key=positions.__getitem__
    ):
        call, after = (
            _change_arguments(node, calls[node.name]),
            _compute_fake_result(node, calls[node.name]),
        )
        if calls[node.name] is Change.COPIED:
            mask = call["attn_mask"]
            if mask not in copies or may_be_written(copies[mask], node):
                copies[mask] = _copy_mask(graph, mask, node)
            call["attn_mask"] = copies[mask]
        node.args, node.kwargs = (), call
        if after.stride() != example(node).stride() and not _is_copied(node, after):
            with graph.inserting_after(node):
                copy = graph.call_method("contiguous", (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy)
            copy.args = (node,)


def _copy_mask(graph: torch.fx.Graph, mask: Node, reader: Node) -> Node:
    """Insert a copy of a mask, with its columns side by side, before its reader; return it."""
    with graph.inserting_before(reader):
        return methods(mask, side_by_side_calls(example(mask)))


def _constant(node: Node, dropout_as_eager: bool, constants: dict[Node, Tensor]) -> Change:
    """Return the change that the mask's constant elements allow. Raises `Refused`."""
    call = arguments(node)
    query, key, mask = (example(call[name]) for name in ("query", "key", "attn_mask"))
    if call.get("is_causal"):
        raise Refused("a mask beside is_causal is an error")
    if call.get("dropout_p") and dropout_as_eager:
        raise Refused(OTHER_NUMBERS)
    constant = value(call["attn_mask"], constants)
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


def _judge_layout(node: Node, dropout_as_eager: bool) -> Change | None:
    """Return `Change.COPIED` if a copy of the mask gets the call a fused kernel, else None.

    Raises `Refused` where the mask may not be copied.
    """
    call = arguments(node)
    mask = example(call["attn_mask"])
    if call.get("is_causal") or not lies_apart(mask):
        return None
    if is_fused(_make_fake_arguments(node, None)) or not is_fused(
        _make_fake_arguments(node, Change.COPIED)
    ):
        return None
    if mask.requires_grad and torch.is_grad_enabled():
        raise Refused("the mask is to get a gradient")
    if call.get("dropout_p") and dropout_as_eager:
        raise Refused(OTHER_NUMBERS)
    _check_layout(node, Change.COPIED)
    return Change.COPIED


def _check_layout(node: Node, change: Change) -> None:
    after = _compute_fake_result(node, change)
    if after.shape != example(node).shape:
        raise Refused("the result has the mask's sizes")
    if after.stride() != example(node).stride() and not example(node).is_contiguous():
        raise Refused("the result would have other strides")


def _change_arguments(node: Node, change: Change) -> dict[str, Any]:
    """Return the arguments of a call, by name, after the change; a mask is not copied yet."""
    call = arguments(node)
    if change is Change.COPIED:
        return call | {"attn_mask": _strip_fill(call["attn_mask"], node)}
    unmasked = {name: argument for name, argument in call.items() if name != "attn_mask"}
    return unmasked | {"is_causal": change is Change.CAUSAL}


def _make_fake_arguments(node: Node, change: Change | None) -> dict[str, Any]:
    """Return the fake arguments of a call, after the change if there is one."""
    call = _change_arguments(node, change) if change else arguments(node)
    fake_arguments = {name: map_arg(argument, example) for name, argument in call.items()}
    if change is Change.COPIED:
        fake_arguments["attn_mask"] = side_by_side(fake_arguments["attn_mask"])
    return fake_arguments


def _compute_fake_result(node: Node, change: Change) -> Tensor:
    """Return the fake result of a changed call. Raises `Refused` where torch has none."""
    return compute_fake_attention(_make_fake_arguments(node, change))


def _strip_fill(mask: Node, reader: Node) -> Node:
    """Return the mask without a `where` whose constant condition leaves all of it as it is.

    T5's bias is filled where a mask hides it, which copies the bias for each row of the batch.
    """
    if mask.target not in WHERE or len(mask.args) != 3:
        return mask
    condition, bias, _ = mask.args
    if not isinstance(condition, Node) or not isinstance(bias, Node):
        return mask
    same = example(bias).dtype == example(mask).dtype and example(bias).dim() == 4
    if not same or may_be_written(bias, reader):
        return mask
    try:
        return _strip_fill(bias, reader) if bool(value(condition, {}).all()) else mask
    except Refused:
        return mask


def _broadcasts(shape: torch.Size, scores: tuple[int, ...]) -> bool:
    """Return whether a mask of `shape` broadcasts to `scores` without widening them."""
    pairs = zip(reversed(shape), reversed(scores), strict=False)
    return len(shape) <= len(scores) and all(size in (1, whole) for size, whole in pairs)


def _hides_nothing(mask: Tensor) -> bool:
    return bool((mask if mask.dtype is torch.bool else mask == 0).all())


def _is_triangle(mask: Tensor, keys: int) -> bool:
    """Return whether row i of a mask leaves the columns up to i as they are and hides the rest."""
    visible = torch.ones(keys, keys, dtype=torch.bool).tril()
    if mask.dtype is torch.bool:
        return bool((mask == visible).all())
    return bool((mask == torch.where(visible, 0.0, float("-inf"))).all())


def _is_copied(node: Node, after: Tensor) -> bool:
    """Return whether the result is only used by a swap of heads and rows that is then copied.

    Then nothing sees the result's strides; laid out as `after` is, there is nothing to copy.
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

"""Masks of attention that follow from constants: dropped, or said as causal.

Read from Dynamo's graph: AOT autograd takes attention apart by the device, and whether a GPU has a
fused kernel for it, forward and backward, may hang on the mask. Of masks that come of inputs, or
of sizes that vary, nothing is known. Attention by hand is for `scores`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg

from ipex_inductor.decisions import GraphReport
from ipex_inductor.passes.literals import Refused, example, value
from ipex_inductor.passes.source import ATTEND, attentions, user_line

Node = torch.fx.Node
aten = torch.ops.aten

NAME = "constant-mask"
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def found(graph: torch.fx.Graph, dropout_as_eager: bool, report: GraphReport) -> dict[str, bool]:
    """The calls, by name, that need no mask: whether they are causal instead.

    `dropout_as_eager`: the very numbers are to be dropped that eager drops. Says of each call what
    became of its mask.
    """
    known: dict[Node, Tensor] = {}
    calls: dict[str, bool] = {}
    for node in attentions(graph):
        try:
            calls[node.name] = _is_causal(node, dropout_as_eager, known)
        except Refused as refused:
            report.add("missed", NAME, str(refused), user_line(node))
        except Exception as error:  # no mask is worth all the other rules
            report.add("missed", NAME, f"{type(error).__name__}: {error}", user_line(node))
        else:
            reason = "is_causal says the same" if calls[node.name] else "it hides nothing"
            report.add("fired", NAME, reason, user_line(node))
            counters["ipex"][NAME] += 1
    return calls


def drop(graph: torch.fx.Graph, calls: Mapping[str, bool]) -> None:
    """Rewrite the calls that `found` named; a result that somebody sees lies as it did."""
    for node in [node for node in attentions(graph) if node.name in calls]:
        call = _unmasked(node, calls[node.name])
        node.args, node.kwargs = (), call
        after = _attended(call)
        if after.stride() != example(node).stride() and not _is_copied(node, after):
            with graph.inserting_after(node):
                copy = graph.call_method("contiguous", (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy)
            copy.args = (node,)


def _is_causal(node: Node, dropout_as_eager: bool, known: dict[Node, Tensor]) -> bool:
    """Whether the mask is what `is_causal` says; False if it hides nothing. Raises `Refused`."""
    call = _bound(node)
    query, key, mask = (example(call[name]) for name in ("query", "key", "attn_mask"))
    if call.get("is_causal"):
        raise Refused("a mask beside is_causal is an error")
    if call.get("dropout_p") and dropout_as_eager:
        raise Refused("another kernel would drop other numbers (fallback_random)")
    constant = value(call["attn_mask"], known)
    scores = (*query.shape[:-1], key.shape[-2])
    if any(isinstance(size, torch.SymInt) for size in scores):
        raise Refused("sizes vary")
    if not _broadcasts(mask.shape, scores):
        raise Refused("the mask has dimensions that the query has not")
    causal = not _hides_nothing(constant)
    if causal and not (scores[-2] == scores[-1] and _is_triangle(constant, scores[-1])):
        raise Refused("it hides something else than what follows")
    after = _attended(_unmasked(node, causal))
    if after.stride() != example(node).stride() and not example(node).is_contiguous():
        raise Refused("the result would lie otherwise in memory")
    return causal


def _bound(node: Node) -> dict[str, Any]:
    return dict(zip(ARGUMENTS, node.args, strict=False)) | node.kwargs


def _unmasked(node: Node, causal: bool) -> dict[str, Any]:
    """The arguments of a call, by name, without the mask."""
    kept = {name: given for name, given in _bound(node).items() if name != "attn_mask"}
    return kept | {"is_causal": causal}


def _attended(call: Mapping[str, Any]) -> Tensor:
    """The fake result of a call. Raises `Refused` where torch has none."""
    given = map_arg(dict(call), example)
    try:
        with unset_fake_temporarily(), given["query"].fake_mode:
            result: Tensor = ATTEND(**given)
    except Exception as error:
        raise Refused(f"torch's attention does not take it without: {error}") from error
    return result


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

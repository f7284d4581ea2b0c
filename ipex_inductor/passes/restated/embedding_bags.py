"""Restate embedding bags of equal lengths as a gather and a sum.

    embedding_bag(weight, indices, offsets=[0, L, 2 L, ...]) => weight[indices [bags, L]].sum(1)

`nn.EmbeddingBag` on indices of two dimensions is of this form, as recommendation models use it.
Torch's kernel is a call that nothing is fused with; as a loop, the sum is written to where its
reader wants it, and indices are read where they are.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "embedding-bag"
OPS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
MODES = ("sum", "mean", "max")


def has_equal_bags(node: Node) -> bool:
    """Return whether all bags of a node are known to be of one length."""
    weight, indices, offsets, _ = _read_node(node)
    if offsets.target is not prims.iota.default:
        return False
    (bags,) = offsets.meta["val"].shape
    start, length = offsets.kwargs["start"], offsets.kwargs["step"]
    return (
        weight.meta["val"].dim() == 2
        and indices.meta["val"].dim() == 1
        and start == 0
        and isinstance(length, int)
        and length > 0
        and not statically_known_true(bags == 0)
        and statically_known_true(bags * length == indices.meta["val"].numel())
    )


def why_not(node: Node) -> str | None:
    """Return why the bags are not restated, or None."""
    *_, options = _read_node(node)
    if MODES[options["mode"]] == "max":
        return "of maxima: torch's kernel computes them"
    if options["per_sample_weights"] is not None:
        return "its rows have weights: torch's kernel computes them"
    if options["padding_idx"] >= 0:
        return "it leaves out rows: torch's kernel computes it"
    if options["include_last_offset"]:
        return "its offsets name the end of the last bag: torch's kernel computes it"
    if any(user.args[1] != 0 for user in node.users):
        return "its further results are used"
    return None


def gather_bags(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Compute the first result of the op; all others are None.

    Args:
        *args: The arguments of the op: weight (rows, width), indices (bags * L), offsets (bags).
        **kwargs: Its keywords.

    Returns:
        (bags, width), and three times None. Sums are in fp32, as torch's kernel has them.
    """
    weight, indices, offsets, options = _read(*args, **kwargs)
    rows = aten.embedding.default(weight, indices.view(offsets.shape[0], -1))
    reduce = torch.mean if MODES[options["mode"]] == "mean" else torch.sum
    return reduce(rows, 1), None, None, None


def _read_node(node: Node) -> tuple[Any, Any, Any, dict[str, Any]]:
    args: Any = node.args
    kwargs: Any = node.kwargs
    return _read(*args, **kwargs)


def _read(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the operands, and the options that change the result in inference."""
    options = {
        "mode": mode,
        "per_sample_weights": per_sample_weights,
        "include_last_offset": include_last_offset,
        "padding_idx": padding_idx,
    }
    return weight, indices, offsets, options

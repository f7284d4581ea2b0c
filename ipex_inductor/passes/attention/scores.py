"""Read the scores of attention, from the softmax up to the product of query and key.

The operations on the scores between the two products, applied to zero, give the mask that torch's
op adds.

Scores masked by `where` are replaced and not added to. The sum is equal where it rounds to the
mask's value, as it does for finite scores if that is the lowest number of fp32 or bf16: torch's
kernels add in fp32, in which numbers around -2^128 are 2^104 apart, so a score below 2^103 in size
is lost. A row masked whole is then uniform in both. The lowest number of fp16 is no such number:
the lowest of fp32 takes its place, which is equal as long as a row keeps a score above -65400.
With -inf, torch's kernels return zeros for a row masked whole, and eager NaN: such a fill is
accepted only where it is a constant and the constants leave every row a score.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ipex_inductor.passes.engine.constants import constant, number
from ipex_inductor.passes.engine.rule import equal_shapes, same_size

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

LOST = -(2.0**127)  # a lower mask value absorbs a score that is added in fp32

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
FLATTEN = (*VIEWS, aten.clone.default, aten.expand.default)

# A change of the mask, its parameters, and the tensors that it takes.
Step = tuple[Callable[..., Tensor | None], tuple[Any, ...], tuple[Node, ...]]


class Refused(Exception):
    """Raised with the reason why something that looks like attention is not rewritten."""


@dataclass(frozen=True)
class Product:
    """The product `node` of `a` and `b`, which are copied and flattened by the nodes in `path`."""

    node: Node
    a: Node
    b: Node
    path: tuple[Node, ...]


@dataclass(frozen=True)
class Scores:
    """The scores: `scale` * q @ k, where k is [batch, heads, width, tokens], after `steps`."""

    q: Node
    k: Node
    scale: float = 1.0
    steps: tuple[Step, ...] = ()

    def then(self, step: Callable[..., Tensor | None], *parameters: Any, of: Any = ()) -> "Scores":
        """Return the scores after one more step, which takes the tensors `of`."""
        return replace(self, steps=(*self.steps, (step, parameters, tuple(of))))

    @property
    def tensors(self) -> tuple[Node, ...]:
        """The tensors that the steps take."""
        return tuple(node for _, _, taken in self.steps for node in taken)

    @property
    def has_fill(self) -> bool:
        """True if some step replaces scores by a constant."""
        return any(step is _fill for step, _, _ in self.steps)


def mask_of(steps: tuple[Step, ...], *tensors: Tensor) -> Tensor | None:
    """Return what the steps add to the scores, in two or four dimensions; None if nothing."""
    remaining: Iterator[Tensor] = iter(tensors)
    mask: Tensor | None = None
    for step, parameters, taken in steps:
        mask = step(mask, *(next(remaining) for _ in taken), *parameters)
    if mask is None or mask.dim() == 2:
        return mask
    return mask[(None,) * (4 - mask.dim())]


def without_widening(scores: Scores) -> Scores:
    """Return the scores without an upcast behind all that is added, as for a softmax in fp32.

    The mask then keeps the dtype of the query, in which torch's kernels on GPUs read it.
    """
    steps = list(scores.steps)
    for at in reversed(range(len(steps))):
        step, parameters, _ = steps[at]
        if step is _cast and parameters[0].itemsize > dtype(scores.q).itemsize:
            del steps[at]
        elif step is not _view:
            break
    return replace(scores, steps=tuple(steps))


def attention_of(bmm: Node) -> tuple[Product, Node] | None:
    """Return the product of a softmax over its last dimension with a value, and that softmax."""
    users = list(bmm.users)
    product = _product(users[0] if len(users) == 1 and users[0].target in VIEWS else bmm)
    node: Any = product.a if product else None
    if node is not None and node.target is prims.convert_element_type.default:
        node = node.args[0]
    if product is None or node.target is not aten._softmax.default:
        return None
    last = node.args[1] in (-1, len(shape(node)) - 1)
    return (product, node) if last else None


def scores_of(product: Product, softmax: Node) -> Scores:
    """Return the scores that `softmax` normalises.

    Raises `Refused` if there are none, or if something else reads them too.
    """
    for node in (*product.path, product.a, softmax):
        if len(node.users) != 1:
            raise Refused(f"the probabilities have {len(node.users)} users")
    scores = _read_scores(softmax.args[0])
    _check_rows(scores)
    return scores


def _check_rows(scores: Scores) -> None:
    """Raise `Refused` if a row may be masked whole by -inf.

    A fill by -inf must be a constant, and the constants must leave each row a score.
    """
    mask: Tensor | None = None
    with unset_fake_temporarily():
        for step, parameters, taken in scores.steps:
            tensors = [constant(node) for node in taken]
            if all(tensor is not None for tensor in tensors):
                mask = step(mask, *tensors, *parameters)
            elif -math.inf in parameters:
                raise Refused("masked scores become -inf, and a row may be masked whole")
        if mask is not None and (mask == -math.inf).all(-1).any():
            raise Refused("masked scores become -inf, and a row is masked whole")


def _product(node: Node) -> Product | None:
    bmm: Any = node.args[0] if node.target in VIEWS else node
    if bmm.target is not aten.bmm.default:
        return None
    lead = shape(node)[:-2]
    (a, path), (b, _) = (_unflatten(factor, lead) for factor in bmm.args)
    return Product(node, a, b, path)


def _unflatten(factor: Any, lead: Any) -> tuple[Any, tuple[Node, ...]]:
    """Return what `factor` was flattened from, and the nodes on the way.

    Its dimensions before the matrices are `lead`.
    """
    wanted = (*lead, *shape(factor)[-2:])
    node, source, path, visited = factor, factor, (), [factor]
    while node.target in FLATTEN:
        if not same(shape(node), shape(node.args[0])) and (
            node.target is aten.expand.default or same(shape(node), wanted)
        ):
            break
        node = node.args[0]
        visited.append(node)
        if same(shape(node), wanted):
            source, path = node, tuple(visited)
    return source, path


# From the softmax up.


def _read_scores(node: Any) -> Scores:
    reader = READERS.get(node.target) if isinstance(node, Node) else None
    if reader is None:
        raise Refused(f"{getattr(node, 'target', node)} is no product of query and key")
    if len(node.users) != 1:
        raise Refused(f"the scores have {len(node.users)} users")
    return reader(node)


def _read_add(node: Node) -> Scores:
    scores, mask = _either(node, *node.args[:2])
    if node.kwargs:
        raise Refused("what is added is scaled")
    if not isinstance(mask, Node) or not isinstance(value(mask), Tensor):
        raise Refused("a number is added to the scores")
    if scores.has_fill and dtype(node) == torch.float16:
        raise Refused("in float16, a mask is added to masked scores")
    return scores.then(_add, dtype(node), of=[mask])


def _either(node: Node, *operands: Any) -> tuple[Scores, Any]:
    """Return the scores and the other operand of a node, in whichever order they come."""
    reasons = []
    for operand, addend in (operands, operands[::-1]):
        try:
            scores = _read_scores(operand)
        except Refused as reason:
            reasons.append(reason)
            continue
        if not equal_shapes(value(operand), value(node)):
            raise Refused("the scores are broadcast to a mask")
        return scores, addend
    raise min(reasons, key=lambda reason: "is no product" in str(reason))


def _read_where(node: Node) -> Scores:
    condition, *branches = node.args
    scores, fill = _either(node, *branches)
    keeps = branches[1] is fill  # whether scores are kept or replaced where `condition` holds
    kind, low = dtype(node), number(fill)
    if low is None:
        raise Refused("masked scores become no constant")
    if low != -math.inf and not on_cpu(node):
        raise Refused(f"what becomes of a row masked whole is not known on {value(node).device}")
    if kind == torch.float16 and low == torch.finfo(kind).min:
        kind, low = torch.float32, torch.finfo(torch.float32).min
    elif low > LOST:
        raise Refused(f"masked scores become {low}: a row masked whole would not stay uniform")
    return scores.then(_fill, keeps, low, kind, of=[condition])


def _read_cast(node: Node) -> Scores:
    scores = _read_scores(node.args[0])
    if scores.has_fill and dtype(node) != torch.float32:
        raise Refused(f"masked scores are rounded to {dtype(node)}")
    return scores.then(_cast, dtype(node))


def _read_scale(node: Node) -> Scores:
    x, scalar = node.args[:2]
    if node.target is aten.mul.Tensor and number(x) is not None:
        x, scalar = scalar, x
    scores, factor = _read_scores(x), number(scalar)
    if not factor or not math.isfinite(factor):
        raise Refused("the scale is not a number")
    if scores.tensors:
        raise Refused("the scores are scaled after they are masked")
    return replace(scores, scale=_times(scores.scale, node, factor))


def _times(scale: float, node: Node, factor: float) -> float:
    return scale / factor if node.target is aten.div.Tensor else scale * factor


def _read_view(node: Node) -> Scores:
    product = _product(node)
    if product is not None:
        return _read_query(product)
    source, shapes = node.args[0], [tuple(shape(n)) for n in (node.args[0], node)]
    if not all(isinstance(size, int) for sizes in shapes for size in sizes):
        raise Refused("a view of unknown size is between softmax and product")
    if shapes[0][-2:] != shapes[1][-2:]:
        raise Refused("a view between changes rows or columns")
    return _read_scores(source).then(_view, *shapes)


def _read_query(product: Product) -> Scores:
    q, scale = product.a, 1.0
    while q.target in (aten.mul.Tensor, aten.div.Tensor):
        factor = number(q.args[1])
        if not factor or not math.isfinite(factor):
            break
        q, scale = q.args[0], _times(scale, q, factor)  # type: ignore[assignment]
    return Scores(q, product.b, scale)


READERS: dict[Any, Callable[[Node], Scores]] = {
    aten.add.Tensor: _read_add,
    aten.where.self: _read_where,
    prims.convert_element_type.default: _read_cast,
    aten.mul.Tensor: _read_scale,
    aten.div.Tensor: _read_scale,
    **dict.fromkeys((*VIEWS, aten.bmm.default), _read_view),
}


# The steps applied to zero, which is None until a mask is added.


def _add(mask: Tensor | None, addend: Tensor, kind: torch.dtype) -> Tensor:
    addend = addend.to(kind)
    return addend if mask is None else mask + addend


def _fill(
    mask: Tensor | None, condition: Tensor, keeps: bool, low: float, kind: torch.dtype
) -> Tensor:
    base = condition.new_zeros((), dtype=kind) if mask is None else mask.to(kind)
    return torch.where(condition, base, low) if keeps else torch.where(condition, low, base)


def _cast(mask: Tensor | None, kind: torch.dtype) -> Tensor | None:
    return None if mask is None else mask.to(kind)


def _view(mask: Tensor | None, source: list[int], shape: list[int]) -> Tensor | None:
    return None if mask is None else mask.expand(source).reshape(shape)


# Facts about nodes.


def value(node: Any) -> Any:
    """Return the fake value of `node`."""
    return node.meta["val"]


def shape(node: Any) -> Any:
    """Return the sizes of `node`, ints or symbols."""
    return value(node).shape


def dtype(node: Any) -> torch.dtype:
    """Return the dtype of `node`."""
    kind: torch.dtype = value(node).dtype
    return kind


def on_cpu(node: Any) -> bool:
    """Return whether `node` is computed on the CPU."""
    return bool(value(node).device.type == "cpu")


def same(a: Any, b: Any) -> bool:
    """Return whether two shapes are known to be equal."""
    return len(a) == len(b) and all(map(same_size, a, b))

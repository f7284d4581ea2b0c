"""Attention written out by hand, as torch's scaled_dot_product_attention.

Scales, masks and casts come in any number and order, so they are read from the graph one by one.
What is done to the scores between the two products, done to zero, is the mask that torch's op adds.

Masked by `where`, scores are replaced and not added to. The sum is the same where it rounds to the
mask's value, as it does for finite scores if that is the lowest number of fp32 or bf16: torch's
kernels add in fp32, in which numbers around -2^128 are 2^104 apart, so a score below 2^103 in size
is lost. A row masked whole is then uniform in both. The lowest number of fp16 is no such number:
the lowest of fp32 takes its place, which is the same as long as a row keeps a score above -65400.
With -inf, torch's kernels return zeros for a row masked whole, and eager NaN: such a mask is taken
only if it is made of constants, and seen to leave every row a score.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from ipex_inductor.passes.rule import equal_shapes, same_size
from ipex_inductor.passes.source import user_line
from ipex_inductor.passes.whole_ops import inline
from ipex_inductor.report import GraphReport
from ipex_inductor.target import current

Node = torch.fx.Node
aten, prims = torch.ops.aten, torch.ops.prims

NAME = "softmax(q@k)@v"
WHOLE = frozenset({"_softmax"})
SLOW = "x86-64:avx512_bf16"
NOTE = "bfloat16 without AMX: Inductor's own products are faster (benchmarks/left_to_inductor.py)"

LOST = -(2.0**127)  # what is lower stays itself when a score is added in fp32
LARGEST = 1 << 22  # elements of a constant mask that is looked at

# A change of the mask, its parameters, and the tensors that it takes.
Step = tuple[Callable[..., Tensor | None], tuple[Any, ...], tuple[Node, ...]]


class Refused(Exception):
    """Why what looks like attention is left alone."""


@dataclass(frozen=True)
class Scores:
    """`scale` * q @ k^T, and what is done to that before it is normalised."""

    q: Node
    k: Node
    scale: float = 1.0
    steps: tuple[Step, ...] = ()

    def then(self, step: Callable[..., Tensor | None], *parameters: Any, of: Any = ()) -> "Scores":
        """The scores after one more step."""
        return replace(self, steps=(*self.steps, (step, parameters, tuple(of))))

    @property
    def masked(self) -> bool:
        """Whether a mask is among the steps."""
        return self.filled or any(step is _add for step, _, _ in self.steps)

    @property
    def filled(self) -> bool:
        """Whether scores were replaced."""
        return any(step is _fill for step, _, _ in self.steps)


@dataclass(frozen=True)
class Product:
    """`node` as the product of `a` and `b`; on the way from `a`, those in `path`."""

    node: Node
    a: Node
    b: Node
    path: tuple[Node, ...]


def fuse_attention(graph: torch.fx.Graph, report: GraphReport) -> None:
    """Rewrite every softmax of a product that is one factor of another; say why where not."""
    masks: dict[Any, Node] = {}  # layers that share their masks share the sums of them
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        product = _product(_result(node))
        softmax = _softmax_of(product) if product else None
        if product is None or softmax is None:
            continue
        where = user_line(product.node)
        try:
            scores = _scores_of(product, softmax)
            if current_arch() == SLOW and _dtype(scores.q) == torch.bfloat16 and _on_cpu(scores.q):
                report.add("left", NAME, NOTE, where)
                continue
            _rewrite(graph, product, scores, masks)
        except Refused as reason:
            report.add("missed", NAME, str(reason), where)
            continue
        report.add("fired", NAME, where=where)
        counters["ipex"][NAME] += 1
    graph.eliminate_dead_code()


@functools.cache
def current_arch() -> str:
    """The architecture of this machine's processor."""
    return current().arch


# The two products.

FLATTEN = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.clone.default,
    aten.expand.default,
)
VIEWS = FLATTEN[:3]


def _result(bmm: Node) -> Node:
    """The view of a product with batch and heads apart, if there is one."""
    users = list(bmm.users)
    return users[0] if len(users) == 1 and users[0].target in VIEWS else bmm


def _product(node: Node) -> Product | None:
    bmm: Any = node.args[0] if node.target in VIEWS else node
    if bmm.target is not aten.bmm.default:
        return None
    lead = _shape(node)[:-2]
    (a, path), (b, _) = (_unflattened(factor, lead) for factor in bmm.args)
    return Product(node, a, b, path)


def _unflattened(factor: Any, lead: Any) -> tuple[Any, tuple[Node, ...]]:
    """What was copied and flattened to `factor`, with dimensions `lead` before its matrices."""
    wanted = (*lead, *_shape(factor)[-2:])
    found, path, seen = factor, (), [factor]
    node = factor
    while node.target in FLATTEN:
        same = _same(_shape(node), _shape(node.args[0]))
        if not same and (node.target is aten.expand.default or _same(_shape(node), wanted)):
            break
        node = node.args[0]
        seen.append(node)
        if _same(_shape(node), wanted):
            found, path = node, tuple(seen)
    return found, path


def _softmax_of(product: Product) -> Node | None:
    """The softmax over its last dimension that is the first factor, cast or not."""
    node = product.a
    if node.target is prims.convert_element_type.default:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not aten._softmax.default:
        return None
    return node if node.args[1] in (-1, _value(node).dim() - 1) else None


def _scores_of(product: Product, softmax: Node) -> Scores:
    for node in {*product.path, product.a, softmax}:
        if len(node.users) != 1:
            raise Refused(f"the probabilities have {len(node.users)} users")
    return _read(softmax.args[0])


# From the softmax up to the first product.


def _read(node: Any) -> Scores:
    reader = READERS.get(node.target) if isinstance(node, Node) else None
    if reader is None:
        raise Refused(f"{getattr(node, 'target', node)} is no product of query and key")
    if len(node.users) != 1:
        raise Refused(f"the scores have {len(node.users)} users")
    return reader(node)


def _added(node: Node) -> Scores:
    if node.kwargs:
        raise Refused("the mask is scaled")
    scores, mask = _either(node, *node.args[:2])
    if _dtype(node) == torch.float16 and scores.filled:
        raise Refused("in float16, a mask is added to masked scores")
    if not isinstance(mask, Node) or not isinstance(_value(mask), Tensor):
        raise Refused("a number is added to the scores")
    return scores.then(_add, _dtype(node), of=[mask])


def _either(node: Node, *operands: Any) -> tuple[Scores, Any]:
    """The scores and the other operand, whichever is which."""
    reasons = []
    for operand, other in (operands, operands[::-1]):
        try:
            scores = _read(operand)
        except Refused as reason:
            reasons.append(reason)
            continue
        if not equal_shapes(_value(operand), _value(node)):
            raise Refused("the scores are broadcast to a mask")
        return scores, other
    raise min(reasons, key=lambda reason: "is no product" in str(reason))


def _chosen(node: Node) -> Scores:
    condition, *branches = node.args
    scores, value = _either(node, *branches)
    dtype, low = _dtype(node), _number(value)
    if low is None:
        raise Refused("masked scores become no constant")
    keeps = branches[1] is value  # or drops, what `condition` holds for
    if low == -math.inf:
        _check_rows(condition, keeps)
    elif dtype == torch.float16 and low == torch.finfo(dtype).min:
        dtype, low = torch.float32, torch.finfo(torch.float32).min
    elif low > LOST:
        raise Refused(f"masked scores become {low}: a row masked whole would not stay uniform")
    if low != -math.inf and not _on_cpu(node):
        raise Refused(f"what a row masked whole becomes on {_value(node).device.type} is not known")
    return scores.then(_fill, keeps, low, dtype, of=[condition])


def _check_rows(condition: Any, keeps: bool) -> None:
    mask = _constant(condition)
    if mask is None:
        raise Refused("masked scores become -inf, and a row may be masked whole: NaN in eager")
    with unset_fake_temporarily():
        if not (mask == keeps).any(-1).all():
            raise Refused("a row is masked whole: NaN in eager")


def _cast(node: Node) -> Scores:
    x, dtype = node.args
    scores = _read(x)
    if scores.filled and dtype != torch.float32:
        raise Refused(f"masked scores are rounded to {dtype}")
    return scores.then(_to, dtype)


def _scaled(node: Node) -> Scores:
    x, factor = node.args[0], _number(node.args[1])
    if factor is None and node.target is aten.mul.Tensor:
        x, factor = node.args[1], _number(node.args[0])
    if factor is None or not factor or not math.isfinite(factor):
        raise Refused("the scale is not a number")
    scores = _read(x)
    if scores.masked:
        raise Refused("the scores are scaled after they are masked")
    return replace(scores, scale=_apply(node, scores.scale, factor))


def _apply(node: Node, scale: float, factor: float) -> float:
    return scale / factor if node.target is aten.div.Tensor else scale * factor


def _viewed(node: Node) -> Scores:
    product = _product(node)
    if product is not None:
        return _queried(product)
    source: Any = node.args[0]
    shapes = tuple(map(tuple, (_shape(source), _shape(node))))
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        raise Refused("a view of unknown size is between")
    if shapes[0][-2:] != shapes[1][-2:]:
        raise Refused("a view between changes rows or columns")
    return _read(source).then(_view, *shapes)


def _queried(product: Product) -> Scores:
    if product.node.target in VIEWS and len(product.node.args[0].users) != 1:  # type: ignore[union-attr]
        raise Refused("the scores have 2 users")
    q, k, scale = product.a, product.b, 1.0
    while q.target in (aten.mul.Tensor, aten.div.Tensor):
        factor = _number(q.args[1])
        if not factor or not math.isfinite(factor) or not _same(_shape(q), _shape(q.args[0])):
            break
        q, scale = q.args[0], _apply(q, scale, factor)  # type: ignore[assignment]
    return Scores(q, k, scale)


READERS: dict[Any, Callable[[Node], Scores]] = {
    aten.add.Tensor: _added,
    aten.where.self: _chosen,
    prims.convert_element_type.default: _cast,
    aten.mul.Tensor: _scaled,
    aten.div.Tensor: _scaled,
    **dict.fromkeys(VIEWS, _viewed),
}


# The same steps on zero, which is None until a mask is added.


def _add(mask: Tensor | None, addend: Tensor, dtype: torch.dtype) -> Tensor:
    addend = addend.to(dtype)
    return addend if mask is None else mask + addend


def _fill(
    mask: Tensor | None, condition: Tensor, keeps: bool, low: float, dtype: torch.dtype
) -> Tensor:
    kept = condition.new_zeros((), dtype=dtype) if mask is None else mask.to(dtype)
    return torch.where(condition, kept, low) if keeps else torch.where(condition, low, kept)


def _to(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else mask.to(dtype)


def _view(mask: Tensor | None, source: list[int], shape: list[int]) -> Tensor | None:
    return None if mask is None else mask.expand(source).reshape(shape)


def _mask(steps: tuple[Step, ...], *tensors: Tensor) -> Tensor | None:
    """What the steps add to the scores; torch's kernels take it in two or four dimensions."""
    given: Iterator[Tensor] = iter(tensors)
    mask: Tensor | None = None
    for step, parameters, taken in steps:
        mask = step(mask, *(next(given) for _ in taken), *parameters)
    if mask is None or mask.dim() == 2:
        return mask
    return mask[(None,) * (4 - mask.dim())]


# The rewriting.


def _why_not(product: Product, scores: Scores, tensors: tuple[Node, ...]) -> str | None:
    q, k, v = map(_value, (scores.q, scores.k, product.b))
    if not q.dtype == k.dtype == v.dtype == _dtype(product.node):
        return "query, key, value and result differ in dtype"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no fused attention in {q.dtype}"
    if not q.dim() == k.dim() == v.dim() == 4:
        return "query, key and value are not [batch, heads, tokens, width]"
    if not _same(k.shape[:2], q.shape[:2]) or not _same(v.shape[:2], q.shape[:2]):
        return "query, key and value differ in batch or heads"
    seen = _Kernels()
    with _fake(q), torch.no_grad():
        try:
            mask = _mask(scores.steps, *map(_value, tensors))
            with seen:
                F.scaled_dot_product_attention(q, k.transpose(-1, -2), v, mask)
        except RuntimeError as error:
            return f"the mask does not fit: {error}"
    return None if seen.fused else "torch has no fused kernel for these shapes and strides"


class _Kernels(TorchDispatchMode):
    """Whether torch chose a kernel for attention; else it multiplies and normalises, as by hand."""

    fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.fused |= name.startswith("_scaled_dot_product_") and not name.endswith("_math")
        return func(*args, **(kwargs or {}))


def _rewrite(
    graph: torch.fx.Graph, product: Product, scores: Scores, masks: dict[Any, Node]
) -> None:
    tensors = tuple(node for _, _, taken in scores.steps for node in taken)
    reason = _why_not(product, scores, tensors)
    if reason is not None:
        raise Refused(reason)
    turned = all(user.target is aten.permute.default for user in product.node.users)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """What views the result was traced on the layout of a product."""
        k = k.transpose(-1, -2)
        found = F.scaled_dot_product_attention(q, k, v, mask, scale=scores.scale)
        return found if turned else found.contiguous()

    with graph.inserting_before(product.node):
        mask = masks.get(scores.steps)
        if mask is None and tensors:
            mask = graph.call_function(_mask, tensors)
            mask.meta = _origin(product.node)
        factors = (scores.q, scores.k, product.b)
        call = graph.call_function(attend, (*factors, mask) if mask else factors)
        call.meta = _origin(product.node)
    if mask is not None and scores.steps not in masks:
        inline(graph, mask, functools.partial(_mask, scores.steps))
        masks[scores.steps] = call.args[3]  # type: ignore[assignment]
    product.node.replace_all_uses_with(call)
    with torch.no_grad():
        inline(graph, call, attend)


def _origin(node: Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key != "val"}


# Facts about nodes.


def _value(node: Any) -> Any:
    return node.meta["val"]


def _shape(node: Any) -> Any:
    return _value(node).shape


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = _value(node).dtype
    return dtype


def _on_cpu(node: Any) -> bool:
    return bool(_value(node).device.type == "cpu")


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def _fake(value: Tensor) -> Any:
    mode = detect_fake_mode([value])
    assert mode is not None
    return mode


def _number(node: Any) -> float | None:
    """A number, or the one element of a constant tensor, rounded as that is."""
    if isinstance(node, (int, float)):
        return node
    constant = _constant(node, 1)
    with unset_fake_temporarily():
        return None if constant is None else constant.item()


def _constant(node: Any, elements: int = LARGEST) -> Tensor | None:
    """What is computed from no input at all, if that and what it comes from is not too large."""
    try:
        with unset_fake_temporarily(), torch.no_grad():
            return _computed(node, elements)
    except Refused:
        return None


def _computed(node: Any, elements: int) -> Any:
    if not isinstance(node, Node):
        return node
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not _same(value.shape, value.shape):
        raise Refused("no tensor")
    sizes = [size for size in value.shape if not isinstance(size, int)]
    if sizes or value.numel() > elements or not isinstance(node.target, torch._ops.OpOverload):
        raise Refused("an input, or too large")
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable:
        raise Refused("another one each time")
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _computed(n, LARGEST))
    return node.target(*args, **kwargs)

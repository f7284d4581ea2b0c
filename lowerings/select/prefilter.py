"""Whether a Dynamo graph may hold what there is to choose for: seen from its calls alone.

To know, a graph is lowered once more, which at a cold start costs as much again as to compile it.
For records that is worth it; for the cost model only where a product plainly is one of its classes,
and what is overlooked gets the library's kernel.
"""

import math
import re
from collections.abc import Iterator

from torch import Tensor
from torch.fx import GraphModule, Node

from ipex_inductor.autotune.predictor import Class, Guesser

# What becomes a batched product, by the names that Dynamo's graphs have.
_BATCHED = re.compile(r"(badd)?bmm|(r|linalg_)?matmul|einsum|tensordot|bilinear")
_OPS = {"aten.bmm.default", "aten.baddbmm.default"}
_VIEWS = {"contiguous", "expand", "flatten", "permute", "reshape", "transpose", "unsqueeze", "view"}


def multiplies_batches(gm: GraphModule) -> bool:
    """Whether a call may become a batched product, which alone has a choice on CPUs."""
    return any(True for _ in _products(gm))


def may_guess(gm: GraphModule, model: Guesser) -> bool:
    """Whether a product in it has the sizes and the epilogue of a class with templates.

    Of classes of other ops than batched products it is not seen, so the graph may.
    """
    if not model.ops() <= _OPS:
        return True
    classes = [each for each in model.classes if each.templates]
    return any(_is_of(each, node, model) for node in _products(gm) for each in classes)


def _products(gm: GraphModule) -> Iterator[Node]:
    graphs = (part.graph for part in gm.modules() if isinstance(part, GraphModule))
    return (node for graph in graphs for node in graph.nodes if _is_product(node))


def _is_product(node: Node) -> bool:
    return _BATCHED.fullmatch(_name(node)) is not None


def _name(node: Node) -> str:
    """Of what a node calls, without overload and underscores; "" for other nodes."""
    if node.op not in ("call_function", "call_method"):
        return ""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.split(".")[0].strip("_")


def _is_of(each: Class, node: Node, model: Guesser) -> bool:
    value, sizes = _value(node), _sizes(node)
    if value is None or sizes is None or str(value.dtype).split(".")[1] not in model.model.dtypes:
        return False
    if not all(low <= n <= high for n, low, high in zip(sizes, each.low, each.high, strict=False)):
        return False
    names = {op.split(".")[1] for op in each.epilogues}
    behind, last = False, node
    while len(last.users) == 1 and _name(next(iter(last.users))) in names | _VIEWS:
        last = next(iter(last.users))
        behind |= _name(last) in names
    return behind == each.behind and all(u.op == "output" or _is_product(u) for u in last.users)


def _sizes(node: Node) -> tuple[int, ...] | None:
    """Products, rows, columns, terms; None if they vary or are not known."""
    value = _value(node)
    first = _value(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if value is None or first is None or value.dim() < 2 or not first.dim():
        return None
    sizes = (*value.shape, first.shape[-1])
    if any(type(n) is not int for n in sizes):
        return None
    return (math.prod(sizes[:-3]), *sizes[-3:])


def _value(node: Node) -> Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None

"""Cheap check on a Dynamo graph: whether it may contain ops for which kernels can be selected.

An exact answer takes lowering the graph once more, which at a cold start costs as much again as
compiling it. For records that is worth it. For the cost model the graph is lowered only if a GEMM
plainly belongs to one of the model's classes; an overlooked GEMM gets the library's kernel.
"""

import math
import re
from collections.abc import Iterator

from torch import Tensor
from torch.fx import GraphModule, Node

from ipex_inductor.autotune.predictor import Class, Guesser

# Names in Dynamo's graphs of calls that may become a batched GEMM.
_BATCHED = re.compile(r"(badd)?bmm|(r|linalg_)?matmul|einsum|tensordot|bilinear")
_OPS = {"aten.bmm.default", "aten.baddbmm.default"}
_VIEWS = {"contiguous", "expand", "flatten", "permute", "reshape", "transpose", "unsqueeze", "view"}


def multiplies_batches(gm: GraphModule) -> bool:
    """Return whether a call may become a batched GEMM, the only op with candidates on CPUs."""
    return any(True for _ in _gemms(gm))


def may_guess(gm: GraphModule, model: Guesser) -> bool:
    """Return whether a GEMM in the graph matches the sizes and epilogue of a class with templates.

    If the model has classes of ops other than batched GEMMs, this is not visible, and the result is
    True.
    """
    if not model.ops() <= _OPS:
        return True
    with_templates = [entry for entry in model.classes if entry.templates]
    return any(
        _matches_class(entry, node, model) for node in _gemms(gm) for entry in with_templates
    )


def _gemms(gm: GraphModule) -> Iterator[Node]:
    """Return an iterator over the GEMMs in a graph and in its submodules."""
    graphs = (part.graph for part in gm.modules() if isinstance(part, GraphModule))
    return (node for graph in graphs for node in graph.nodes if _is_gemm(node))


def _is_gemm(node: Node) -> bool:
    return _BATCHED.fullmatch(_name(node)) is not None


def _name(node: Node) -> str:
    """Return the name of what a node calls, without overload and underscores.

    The result is "" for nodes that are no calls.
    """
    if node.op not in ("call_function", "call_method"):
        return ""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.split(".")[0].strip("_")


def _matches_class(entry: Class, node: Node, model: Guesser) -> bool:
    """Return whether the sizes, dtype and epilogue of a GEMM match a class of the model."""
    value, sizes = _value(node), _sizes(node)
    if value is None or sizes is None or str(value.dtype).split(".")[1] not in model.model.dtypes:
        return False
    if not all(
        low <= n <= high for n, low, high in zip(sizes, entry.low, entry.high, strict=False)
    ):
        return False
    names = {op.split(".")[1] for op in entry.epilogues}
    has_epilogue, last = False, node
    while len(last.users) == 1 and _name(next(iter(last.users))) in names | _VIEWS:
        last = next(iter(last.users))
        has_epilogue |= _name(last) in names
    return has_epilogue == entry.behind and all(u.op == "output" or _is_gemm(u) for u in last.users)


def _sizes(node: Node) -> tuple[int, ...] | None:
    """Return batch, M, N and K of a GEMM; None if they vary or are not known."""
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

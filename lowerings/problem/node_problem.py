"""Read a problem from a graph node.

The pointwise ops that follow the op in the graph are its epilogue. It is written as one expression
over the op's result `y` and the operands `x0`, `x1`, ...:
`aten.relu.default(aten.add.Tensor(y, x3))`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.fx import Node

from ipex_inductor.autotune.ranges import number
from ipex_inductor.autotune.record import Constant, Operand, Problem, Symbol
from ipex_inductor.lowerings.problem.settings import relevant_settings
from ipex_inductor.lowerings.problem.workload import LAST_FACTORS, is_list

EPILOGUE_NODES = 16  # limit of an epilogue's length, in nodes


def problem_of(
    node: Node, arch: str, settings: Mapping[str, Constant], strides: Sequence[Any] = ()
) -> Problem | None:
    """Return the problem of `node` and its epilogue; None if a record cannot describe it.

    A dynamic size is described by the powers of two around its current value.

    Args:
        node: node of the op.
        arch: architecture of the device.
        settings: settings of the device.
        strides: strides of the operands as they were lowered; None for an unknown one.
    """
    bound = _bound(node)
    if bound is None:
        return None
    tensors, constants = bound
    epilogue, epilogue_inputs = _epilogue(node)
    nodes = [*tensors, *(o for o in epilogue_inputs if o not in tensors)]
    values = [n.meta["val"] for n in nodes]
    lowered_strides = [*strides, *[None] * len(nodes)]
    laid_out = [
        v.stride() if stride is None or len(stride) != v.dim() else stride
        for v, stride in zip(values, lowered_strides, strict=False)
    ]
    symbols = _symbols(values)
    if symbols is None:
        return None
    names = {expr: symbol.name for expr, symbol in symbols.items()}
    try:
        operands = tuple(
            Operand(
                _record_sizes(v.shape, names),
                _record_sizes(stride, names),
                str(v.dtype).split(".")[1],
            )
            for v, stride in zip(values, laid_out, strict=True)
        )
    except KeyError:  # A stride has a symbol that is not in the sizes.
        return None
    operands = by_one_layout(str(node.target), operands)
    text = _text(epilogue, node, {n: f"x{i}" for i, n in enumerate(nodes)})
    ranges = tuple(symbols.values())
    op = str(node.target)
    relevant = relevant_settings(settings, op, {operand.dtype for operand in operands})
    return Problem(op, operands, arch, constants, text, ranges, relevant)


def by_one_layout(op: str, operands: Sequence[Operand]) -> tuple[Operand, ...]:
    """Return the operands of `op`, with windows of one layout marked as the activation's.

    1x1 windows, and windows of one channel, lie alike in memory in both layouts. So a model whose
    weights are channels-last too has their records.
    """
    factors = LAST_FACTORS.get(op.partition(".")[2].partition(".")[0], ())
    channels_last = bool(operands) and len(operands[0].shape) == 4 and operands[0].stride[1] == 1
    return tuple(
        _as_last(o) if channels_last and i in factors else o for i, o in enumerate(operands)
    )


def _as_last(window: Operand) -> Operand:
    if len(window.shape) != 4:
        return window
    channels, height, width = window.shape[1:]
    if (height, width) == (1, 1) and window.stride[:2] == (channels, 1):
        return replace(window, stride=(channels, 1, channels, channels))
    if channels == 1 and window.stride[2:] == (width, 1):
        return replace(window, stride=(window.stride[0], 1, width, 1))
    return window


def _bound(node: Node) -> tuple[list[Node], dict[str, Constant]] | None:
    """Return the tensors of a call in the schema's order, and its other arguments by name.

    The result is None if an argument cannot be stored in a record.
    """
    tensors: list[Node] = []
    constants: dict[str, Constant] = {}
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if i < len(node.args):
            value = node.args[i]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            continue
        if isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor):
            tensors.append(value)
        elif is_list(argument) and isinstance(value, (list, tuple)):
            several = [n for n in value if isinstance(n, Node)]
            if not all(isinstance(n.meta.get("val"), Tensor) for n in several):
                return None
            tensors += several
            constants[argument.name] = len(value)
        elif argument.has_default_value() and value == argument.default_value:
            continue
        elif (constant := _record_value(value)) is not _UNKNOWN:
            constants[argument.name] = constant
        else:
            return None
    return tensors, constants


_UNKNOWN: Any = object()


def _record_value(value: Any) -> Any:
    """Return `value` in a record's form, or `_UNKNOWN` if it has none."""
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device)):
        return str(value)
    several = isinstance(value, (list, tuple))
    if any(type(v) is float and math.isnan(v) for v in (value if several else [value])):
        return _UNKNOWN  # NaN does not equal itself when it is read back.
    if several and all(type(v) in (int, float) for v in value):
        return tuple(value)
    return value if value is None or type(value) in (bool, int, float, str) else _UNKNOWN


def _symbols(values: Sequence[Any]) -> "dict[sympy.Expr, Symbol] | None":
    """Return a symbol for each dynamic size, with the powers of two around its current value.

    The result is None if a current value is not known. A size gets its own symbol even if it is a
    multiple of another: of `64*batch` rows only the product counts.
    """
    symbols: dict[sympy.Expr, Symbol] = {}
    for size in (n for value in values for n in value.shape if isinstance(n, torch.SymInt)):
        expr = size.node.expr
        if expr in symbols or expr.is_Integer:
            continue
        hint = size.node.hint
        bounds = size.node.shape_env.bound_sympy(expr)
        if not isinstance(hint, int) or hint < 1:
            return None
        high = max(4, 1 << (hint - 1).bit_length())
        low = max(2 if high == 4 else high // 2 + 1, int(bounds.lower))
        symbols[expr] = Symbol(f"n{len(symbols)}", low, int(min(high, bounds.upper)))
    return symbols


def _record_sizes(sizes: Sequence[Any], names: "Mapping[sympy.Expr, str]") -> tuple[int | str, ...]:
    """Return sizes or strides in a record's form.

    Raises:
        KeyError: a size depends on symbols that are not in `names`.
    """
    return tuple(_record_size(n, names) for n in sizes)


def _record_size(size: Any, names: "Mapping[sympy.Expr, str]") -> int | str:
    expr = sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)
    symbols = {e: sympy.Symbol(name, integer=True, positive=True) for e, name in names.items()}
    # All are replaced at once, as torch may use these names for other symbols.
    expr = expr.subs(symbols, simultaneous=True)
    if expr.is_Integer:
        return int(expr)
    if not {str(s) for s in expr.free_symbols} <= set(names.values()):
        raise KeyError(str(expr))
    text = str(expr)
    number(text, dict.fromkeys(names.values(), 2))
    return text


def _epilogue(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the epilogue's nodes after `node` and the other nodes that they read.

    The epilogue is pointwise, and only its last node is used outside of it.
    """
    region, last = [node], 0
    inside = {node}
    queue = sorted(node.users)
    while queue and len(region) <= EPILOGUE_NODES:
        user = queue.pop(0)
        if user in inside or not _is_pointwise(user, node):
            continue
        inside.add(user)
        region.append(user)
        queue = sorted({*queue, *user.users})
        leaving = [n for n in region if any(u not in inside for u in n.users)]
        if leaving == [user]:
            last = len(region) - 1
    fused = region[: last + 1]
    return fused[1:], list(
        dict.fromkeys(a for n in fused[1:] for a in n.all_input_nodes if a not in fused)
    )


def _is_pointwise(node: Node, like: Node) -> bool:
    """Return whether `node` computes each element by itself, in the shape of `like`."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    cast = torch.ops.prims.convert_element_type.default
    if node.target is not cast and torch.Tag.pointwise not in node.target.tags:
        return False
    value, want = node.meta.get("val"), like.meta["val"]
    non_tensors = [a for a in node.all_input_nodes if not isinstance(a.meta.get("val"), Tensor)]
    storable = all(_record_value(a) is not _UNKNOWN or isinstance(a, Node) for a in node.args)
    storable &= all(
        _record_value(a) is not _UNKNOWN or isinstance(a, Node) for a in node.kwargs.values()
    )
    return isinstance(value, Tensor) and value.shape == want.shape and not non_tensors and storable


def _text(nodes: Sequence[Node], product: Node, names: Mapping[Node, str]) -> str:
    """Return `nodes` as one expression; "" if there are none."""
    written: dict[Node, str] = {**names, product: "y"}
    for node in nodes:
        arguments = [_argument(a, written) for a in node.args]
        arguments += [f"{k}={_argument(a, written)}" for k, a in node.kwargs.items()]
        written[node] = f"{node.target}({', '.join(arguments)})"
    return written[nodes[-1]] if nodes else ""


def _argument(value: Any, written: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return written[value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    # 1e999 is a literal that is read as infinity.
    return repr(_record_value(value)).replace("inf", "1e999")

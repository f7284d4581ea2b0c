"""A problem and the graph node it came from: read from one, and made runnable again.

What follows the op in the graph and is pointwise is its epilogue, written as one expression over
the op's result `y` and the operands `x0`, `x1`, ...: `aten.relu.default(aten.add.Tensor(y, x3))`.
"""

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from msgspec.structs import replace
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Node

import ipex_inductor.ops  # noqa: F401  what problems may be of
from ipex_inductor.autotune.ranges import number, points
from ipex_inductor.autotune.record import Constant, Operand, Problem, Symbol
from ipex_inductor.lowerings.problem.settings import obeyed

VARIANCE = "variance"  # a tensor of that name holds no numbers below zero, and none near it
EPILOGUE_NODES = 16  # what is longer is no matter of the op's
_CAST = re.compile(r"torch\.(float16|bfloat16|float32)\b")


def problem_of(
    node: Node, arch: str, settings: Mapping[str, Constant], strides: Sequence[Any] = ()
) -> Problem | None:
    """What `node` computes and what follows it; None for what no record can say.

    `strides` are those of the operands as they were lowered, None where that is not known. A size
    that varies is known by the powers of two about the one it has now.
    """
    bound = _bound(node)
    if bound is None:
        return None
    tensors, constants = bound
    epilogue, others = _epilogue(node)
    nodes = [*tensors, *(o for o in others if o not in tensors)]
    values = [n.meta["val"] for n in nodes]
    known = [*strides, *[None] * len(nodes)]
    laid_out = [
        v.stride() if stride is None or len(stride) != v.dim() else stride
        for v, stride in zip(values, known, strict=False)
    ]
    symbols = _symbols(values)
    if symbols is None:
        return None
    names = {expr: symbol.name for expr, symbol in symbols.items()}
    try:
        operands = tuple(
            Operand(_said(v.shape, names), _said(stride, names), str(v.dtype).split(".")[1])
            for v, stride in zip(values, laid_out, strict=True)
        )
    except KeyError:  # a stride that is not of these sizes
        return None
    operands = by_one_layout(str(node.target), operands)
    text = _text(epilogue, node, {n: f"x{i}" for i, n in enumerate(nodes)})
    ranges = tuple(symbols.values())
    op = str(node.target)
    given = obeyed(settings, op, {operand.dtype for operand in operands})
    return Problem(op, operands, arch, constants, text, ranges, given)


def by_one_layout(op: str, operands: Sequence[Operand]) -> tuple[Operand, ...]:
    """The operands of `op`; a window of one pixel as of channels-last where its image is.

    It lies alike in both, so a model all of which is in channels-last has a record of it.
    """
    factors = _LAST_FACTORS.get(op.partition(".")[2].partition(".")[0], ())
    last = bool(operands) and len(operands[0].shape) == 4 and operands[0].stride[1] == 1
    return tuple(_as_last(o) if last and i in factors else o for i, o in enumerate(operands))


def _as_last(window: Operand) -> Operand:
    shape = window.shape
    if len(shape) != 4 or shape[2:] != (1, 1) or window.stride[:2] != (shape[1], 1):
        return window
    return replace(window, stride=(shape[1], 1, shape[1], shape[1]))


def mark(problem: Problem, inputs: Sequence[Tensor]) -> None:
    """Let Dynamo know which sizes of `inputs` are `problem`'s symbols, and their ranges."""
    ranges = {s.name: s for s in problem.symbols}
    for operand, tensor in zip(problem.operands, inputs, strict=True):
        for dimension, size in enumerate(operand.shape):
            if isinstance(size, str):
                low, high = ranges[size].low, ranges[size].high
                torch._dynamo.mark_dynamic(tensor, dimension, min=low, max=high)


def inputs_of(problem: Problem, device: torch.device, seed: int) -> list[Tensor]:
    """Random operands, one factor scaled so that each product is of the size of all others.

    Or a bias would hide it, an epilogue flatten it, and a low precision overflow.
    """
    generator = torch.Generator(device).manual_seed(seed)
    operands = [_random(o, device, generator) for o in problem.operands]
    for place, terms in _summed(problem):
        factor = operands[place]
        if factor.is_floating_point() and terms > 1:
            steps = factor.stride()
            own = [n if step else 1 for n, step in zip(factor.shape, steps, strict=True)]
            factor.as_strided(own, steps).div_(math.sqrt(terms))
    for name, operand in zip(_free(problem), operands, strict=False):
        if name == VARIANCE:
            operand.abs_().add_(1)
    return operands


def function_of(
    problem: Problem, body: Callable[..., Tensor] | None = None
) -> Callable[..., Tensor]:
    """The op and its epilogue, as a function of the operands.

    `body` computes the op instead, with all its arguments in their order.
    """
    op = _op(problem.op)
    epilogue = ast.parse(problem.epilogue or "y", mode="eval").body
    names = [argument.name for argument in op._schema.arguments]
    constants = {name: _constant(value) for name, value in problem.constants.items()}
    free, lists = _free(problem), _lists(problem)

    def call(*operands: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip(free, operands, strict=False))
        given |= {name: [given[each] for each in own] for name, own in lists.items()}
        known = {n: given.get(n, constants.get(n)) for n in names if n in given or n in constants}
        y = body(*known.values()) if body else op(**known)
        values = {"y": y} | {f"x{i}": t for i, t in enumerate(operands)}
        result: Tensor = _evaluated(epilogue, values)
        return result

    return call


def named(problem: Problem) -> dict[str, Operand]:
    """The operands of the op by the names of its schema, without those of the epilogue.

    The tensors of a list have its name and a number each.
    """
    return dict(zip(_free(problem), problem.operands, strict=False))


def check(problem: Problem) -> Problem:
    """The same problem; raises what torch does where it cannot be called like that."""
    for point in points(problem):
        with FakeTensorMode():
            operands = [empty(o, torch.device("cpu")) for o in point.operands]
            result = function_of(point)(*operands)
        if not isinstance(result, Tensor):
            raise TypeError(f"{problem.op} does not give one tensor")
    return problem


def widened(problem: Problem) -> Problem:
    """The same in float64: operands, and what the epilogue casts to."""
    wide = tuple(
        replace(o, dtype="float64") if _dtype(o.dtype).is_floating_point else o
        for o in problem.operands
    )
    return replace(problem, operands=wide, epilogue=_CAST.sub("torch.float64", problem.epilogue))


def _free(problem: Problem) -> list[str]:
    """The tensors that the op takes here, by the names of its schema."""
    lists = _lists(problem)
    taken = (n for n in _tensors(problem.op) if n in lists or n not in problem.constants)
    return [each for name in taken for each in lists.get(name, [name])]


def _lists(problem: Problem) -> dict[str, list[str]]:
    """The names of the tensors in each list of them, which has its length among the constants."""
    lengths = ((name, problem.constants[name]) for name in _tensor_lists(problem.op))
    return {n: [f"{n}{i}" for i in range(k)] for n, k in lengths if isinstance(k, int)}


def _bound(node: Node) -> tuple[list[Node], dict[str, Constant]] | None:
    """The tensors of a call in the order of the schema, and its other arguments by name."""
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
        elif _is_list(argument) and isinstance(value, (list, tuple)):
            several = [n for n in value if isinstance(n, Node)]
            if not all(isinstance(n.meta.get("val"), Tensor) for n in several):
                return None
            tensors += several
            constants[argument.name] = len(value)
        elif argument.has_default_value() and value == argument.default_value:
            continue
        elif (constant := _plain(value)) is not _UNKNOWN:
            constants[argument.name] = constant
        else:
            return None
    return tensors, constants


_UNKNOWN: Any = object()


def _plain(value: Any) -> Any:
    """`value` as a record holds it."""
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device)):
        return str(value)
    several = isinstance(value, (list, tuple))
    if any(type(v) is float and math.isnan(v) for v in (value if several else [value])):
        return _UNKNOWN  # nothing that reads back is itself
    if several and all(type(v) in (int, float) for v in value):
        return tuple(value)
    return value if value is None or type(value) in (bool, int, float, str) else _UNKNOWN


def _constant(value: Constant) -> Any:
    """What `_plain` made `value` of, where an op takes it."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return list(value) if isinstance(value, tuple) else value


def _symbols(values: Sequence[Any]) -> "dict[sympy.Expr, Symbol] | None":
    """A symbol for each size that varies, with the powers of two it lies between now.

    None where that is not known. A size is a symbol of its own though it is a multiple of another:
    of `64*batch` rows nothing but the product counts.
    """
    found: dict[sympy.Expr, Symbol] = {}
    for size in (n for value in values for n in value.shape if isinstance(n, torch.SymInt)):
        expr = size.node.expr
        if expr in found or expr.is_Integer:
            continue
        hint = size.node.hint
        bounds = size.node.shape_env.bound_sympy(expr)
        if not isinstance(hint, int) or hint < 1:
            return None
        high = max(4, 1 << (hint - 1).bit_length())
        low = max(2 if high == 4 else high // 2 + 1, int(bounds.lower))
        found[expr] = Symbol(f"n{len(found)}", low, int(min(high, bounds.upper)))
    return found


def _said(sizes: Sequence[Any], names: "Mapping[sympy.Expr, str]") -> tuple[int | str, ...]:
    """Sizes or strides as a record has them. Raises `KeyError` for one of other symbols."""
    return tuple(_said_one(n, names) for n in sizes)


def _said_one(size: Any, names: "Mapping[sympy.Expr, str]") -> int | str:
    expr = sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)
    known = {e: sympy.Symbol(name, integer=True, positive=True) for e, name in names.items()}
    expr = expr.subs(known, simultaneous=True)  # torch may have symbols of these names
    if expr.is_Integer:
        return int(expr)
    if not {str(s) for s in expr.free_symbols} <= set(names.values()):
        raise KeyError(str(expr))
    text = str(expr)
    number(text, dict.fromkeys(names.values(), 2))
    return text


def _epilogue(node: Node) -> tuple[list[Node], list[Node]]:
    """The pointwise nodes behind `node` that only its last one leaves, and what else they read."""
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
    kept = region[: last + 1]
    return kept[1:], list(
        dict.fromkeys(a for n in kept[1:] for a in n.all_input_nodes if a not in kept)
    )


def _is_pointwise(node: Node, like: Node) -> bool:
    """Whether it computes each element of a result shaped as `like`'s by itself."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    cast = torch.ops.prims.convert_element_type.default
    if node.target is not cast and torch.Tag.pointwise not in node.target.tags:
        return False
    value, want = node.meta.get("val"), like.meta["val"]
    others = [a for a in node.all_input_nodes if not isinstance(a.meta.get("val"), Tensor)]
    plain = all(_plain(a) is not _UNKNOWN or isinstance(a, Node) for a in node.args)
    plain &= all(_plain(a) is not _UNKNOWN or isinstance(a, Node) for a in node.kwargs.values())
    return isinstance(value, Tensor) and value.shape == want.shape and not others and plain


def _text(nodes: Sequence[Node], product: Node, names: Mapping[Node, str]) -> str:
    """`nodes` as one expression; "" if there are none."""
    written: dict[Node, str] = {**names, product: "y"}
    for node in nodes:
        given = [_argument(a, written) for a in node.args]
        given += [f"{k}={_argument(a, written)}" for k, a in node.kwargs.items()]
        written[node] = f"{node.target}({', '.join(given)})"
    return written[nodes[-1]] if nodes else ""


def _argument(value: Any, written: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return written[value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return repr(_plain(value)).replace("inf", "1e999")  # a literal, which reads as infinite


def _evaluated(node: ast.expr, values: Mapping[str, Tensor]) -> Any:
    """An epilogue's expression: calls of torch's ops on values and constants, nothing else."""
    match node:
        case ast.Call(func=function, args=args, keywords=keywords):
            given = [_evaluated(a, values) for a in args]
            named = {str(k.arg): _evaluated(k.value, values) for k in keywords}
            return _op(ast.unparse(function))(*given, **named)
        case ast.Name(id=name):
            return values[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _constant(f"torch.{name}")
        case _:
            return ast.literal_eval(node)


def _op(name: str) -> Any:
    """The op `aten.mm.default`. Raises `AttributeError` where torch has none of that name."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


@functools.cache
def _tensors(name: str) -> tuple[str, ...]:
    """The arguments that are tensors: each tile of each template asks for them."""
    arguments = _op(name)._schema.arguments
    return tuple(a.name for a in arguments if "Tensor" in str(a.type))


@functools.cache
def _tensor_lists(name: str) -> tuple[str, ...]:
    return tuple(a.name for a in _op(name)._schema.arguments if _is_list(a))


def _is_list(argument: Any) -> bool:
    """Whether it is a list of tensors, none of which may be left out."""
    return str(argument.type) == "List[Tensor]"


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def empty(operand: Operand, device: torch.device) -> Tensor:
    """Memory of that shape and stride; where a stride is 0, all are one element."""
    shape, stride = ([int(n) for n in given] for given in (operand.shape, operand.stride))
    own = [1 if step == 0 else n for n, step in zip(shape, stride, strict=True)]
    return torch.empty_strided(own, stride, dtype=_dtype(operand.dtype), device=device).expand(
        shape
    )


def _random(operand: Operand, device: torch.device, generator: torch.Generator) -> Tensor:
    result = empty(operand, device)
    own = result.as_strided(
        [1 if step == 0 else n for n, step in zip(result.shape, result.stride(), strict=True)],
        result.stride(),
    )
    if own.is_floating_point():
        own.copy_(torch.randn(own.shape, generator=generator, device=device))
    else:
        own.copy_(torch.randint(0, 2, own.shape, generator=generator, device=device))
    return result


def _summed(problem: Problem) -> list[tuple[int, int]]:
    """The operand that is multiplied last, and how many products a sum is of: of each product."""
    packet = problem.op.split(".")[1]
    factors = _LAST_FACTORS.get(packet, (0,))
    return [(i, _terms(packet, i, [*map(int, problem.operands[i].shape)])) for i in factors]


def _terms(packet: str, last: int, shape: list[int]) -> int:
    if packet == "conv_weight_grad":  # of all pixels
        return shape[0] * math.prod(shape[2:])
    return math.prod(shape[1:]) if packet in _BY_ROWS else shape[-2] if last else 1


_LAST_FACTORS: dict[str, tuple[int, ...]] = {
    "mm": (1,),
    "bmm": (1,),
    "addmm": (2,),
    "baddbmm": (2,),
    "convolution": (1,),
}
# Ours.
_LAST_FACTORS |= {"conv": (1,), "conv_pool": (1,), "conv_shortcut": (1, 4), "linear": (1,)}
_LAST_FACTORS |= {"gated_linear": (1, 2), "conv_preactivated": (1,)}
# A weight has all that is summed behind its rows.
_BY_ROWS = {"convolution", "conv", "conv_pool", "conv_preactivated", "conv_shortcut"}
_BY_ROWS |= {"gated_linear", "linear"}

"""Conversion between a problem and a graph node: read from a node, and made runnable again.

The pointwise ops that follow the op in the graph are its epilogue. It is written as one expression
over the op's result `y` and the operands `x0`, `x1`, ...:
`aten.relu.default(aten.add.Tensor(y, x3))`.
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
from ipex_inductor.lowerings.problem.settings import relevant_settings

VARIANCE = "variance"  # A tensor of this name has only elements well above zero.
EPILOGUE_NODES = 16  # limit of an epilogue's length, in nodes
_CAST = re.compile(r"torch\.(float16|bfloat16|float32)\b")


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
    """Return the operands of `op`, with 1x1 kernels marked channels-last if the activation is.

    Both layouts are one in memory, so a model that is all channels-last has a record of it.
    """
    factors = _LAST_FACTORS.get(op.partition(".")[2].partition(".")[0], ())
    channels_last = bool(operands) and len(operands[0].shape) == 4 and operands[0].stride[1] == 1
    return tuple(
        _as_last(o) if channels_last and i in factors else o for i, o in enumerate(operands)
    )


def _as_last(window: Operand) -> Operand:
    shape = window.shape
    if len(shape) != 4 or shape[2:] != (1, 1) or window.stride[:2] != (shape[1], 1):
        return window
    return replace(window, stride=(shape[1], 1, shape[1], shape[1]))


def mark(problem: Problem, inputs: Sequence[Tensor]) -> None:
    """Tell Dynamo which sizes of `inputs` are the problem's symbols, with their ranges."""
    ranges = {s.name: s for s in problem.symbols}
    for operand, tensor in zip(problem.operands, inputs, strict=True):
        for dimension, size in enumerate(operand.shape):
            if isinstance(size, str):
                low, high = ranges[size].low, ranges[size].high
                torch._dynamo.mark_dynamic(tensor, dimension, min=low, max=high)


def inputs_of(problem: Problem, device: torch.device, seed: int) -> list[Tensor]:
    """Return random operands, with one factor scaled so that each GEMM's sums have unit scale.

    Otherwise a bias could hide the sums, an epilogue saturate, and a low precision overflow.
    """
    generator = torch.Generator(device).manual_seed(seed)
    operands = [_random(o, device, generator) for o in problem.operands]
    for index, terms in _last_factors(problem):
        factor = operands[index]
        if factor.is_floating_point() and terms > 1:
            steps = factor.stride()
            unexpanded = [n if step else 1 for n, step in zip(factor.shape, steps, strict=True)]
            factor.as_strided(unexpanded, steps).div_(math.sqrt(terms))
    by_name = dict(zip(_free(problem), operands, strict=False))
    if VARIANCE in by_name:
        by_name[VARIANCE].abs_().add_(1)
    if {"factors", "scales"} <= by_name.keys():
        _fill_quantized(by_name, generator)
    return operands


def _fill_quantized(operands: Mapping[str, Tensor], generator: torch.Generator) -> None:
    """Fill the operands of a product of 8-bit integers so that its results use their range.

    Args:
        operands: by the names of `ipex::int8_conv` or `ipex::int8_linear`, changed in place.
        generator: of random numbers, on their device.
    """
    for name in ("x", "weight", "other"):
        operand = operands.get(name)
        if operand is not None and not operand.is_floating_point():
            bounds = torch.iinfo(operand.dtype)
            operand.random_(bounds.min, bounds.max + 1, generator=generator)
    factors, scales = operands["factors"], operands["scales"]
    terms = operands["weight"].numel() / factors.shape[1]
    # Integers of a whole range have a standard deviation of 74. Zero points are zero, so lines of
    # pixels at the border, behind the first two, add nothing.
    factors[0].abs_().add_(0.5).div_(74 * 74 * math.sqrt(terms))
    factors[2:] = 0.0
    x_zero_point, other_scale, other_zero_point = 0.0, 1 / 74, 3.0
    inverse_scale, zero_point, least, most = 40.0, 5.0, -128.0 - 5, 127.0 - 5
    numbers = x_zero_point, other_scale, other_zero_point, inverse_scale, zero_point, least, most
    scales.copy_(torch.tensor(numbers, device=scales.device, dtype=scales.dtype))


def function_of(
    problem: Problem, body: Callable[..., Tensor] | None = None
) -> Callable[..., Tensor]:
    """Return the op and its epilogue as a function of the operands.

    Args:
        problem: problem to compute.
        body: computes the op instead, and takes all its arguments in their order.
    """
    op = _op(problem.op)
    epilogue = ast.parse(problem.epilogue or "y", mode="eval").body
    names = [argument.name for argument in op._schema.arguments]
    constants = {name: _constant(value) for name, value in problem.constants.items()}
    free, lists = _free(problem), _lists(problem)

    def call(*operands: Tensor) -> Tensor:
        tensors: dict[str, Any] = dict(zip(free, operands, strict=False))
        tensors |= {name: [tensors[item] for item in items] for name, items in lists.items()}
        arguments = {
            n: tensors.get(n, constants.get(n)) for n in names if n in tensors or n in constants
        }
        y = body(*arguments.values()) if body else op(**arguments)
        values = {"y": y} | {f"x{i}": t for i, t in enumerate(operands)}
        result: Tensor = _evaluate(epilogue, values)
        return result

    return call


def operands_by_name(problem: Problem) -> dict[str, Operand]:
    """Return the op's operands by the names of its schema, without the epilogue's operands.

    Each tensor of a list has the list's name and its index.
    """
    return dict(zip(_free(problem), problem.operands, strict=False))


def check(problem: Problem) -> Problem:
    """Return `problem`; raise torch's error if the op cannot be called like that."""
    for point in points(problem):
        with FakeTensorMode():
            operands = [empty(o, torch.device("cpu")) for o in point.operands]
            result = function_of(point)(*operands)
        if not isinstance(result, Tensor):
            raise TypeError(f"{problem.op} does not give one tensor")
    return problem


def to_float64(problem: Problem) -> Problem:
    """Return the problem in float64: its operands and the casts of its epilogue."""
    wide = tuple(
        replace(o, dtype="float64") if _dtype(o.dtype).is_floating_point else o
        for o in problem.operands
    )
    return replace(problem, operands=wide, epilogue=_CAST.sub("torch.float64", problem.epilogue))


def _free(problem: Problem) -> list[str]:
    """Return the names of the op's tensor arguments that the problem passes."""
    lists = _lists(problem)
    names = (n for n in _tensors(problem.op) if n in lists or n not in problem.constants)
    return [item for name in names for item in lists.get(name, [name])]


def _lists(problem: Problem) -> dict[str, list[str]]:
    """Return the names of the tensors in each list argument.

    A list's length is among the problem's constants.
    """
    lengths = ((name, problem.constants[name]) for name in _tensor_lists(problem.op))
    return {n: [f"{n}{i}" for i in range(k)] for n, k in lengths if isinstance(k, int)}


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
        elif _is_list(argument) and isinstance(value, (list, tuple)):
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


def _constant(value: Constant) -> Any:
    """Return the op's argument from which `_record_value` made `value`."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return list(value) if isinstance(value, tuple) else value


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


def _evaluate(node: ast.expr, values: Mapping[str, Tensor]) -> Any:
    """Evaluate an epilogue's expression; it may only call torch ops on values and constants."""
    match node:
        case ast.Call(func=function, args=args, keywords=keywords):
            positional = [_evaluate(a, values) for a in args]
            by_keyword = {str(k.arg): _evaluate(k.value, values) for k in keywords}
            return _op(ast.unparse(function))(*positional, **by_keyword)
        case ast.Name(id=name):
            return values[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _constant(f"torch.{name}")
        case _:
            return ast.literal_eval(node)


def _op(name: str) -> Any:
    """Return the op of a name like `aten.mm.default`.

    Raises:
        AttributeError: torch has no op of that name.
    """
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


@functools.cache
def _tensors(name: str) -> tuple[str, ...]:
    """Return the names of the op's tensor arguments; cached, as each tile needs them."""
    arguments = _op(name)._schema.arguments
    return tuple(a.name for a in arguments if "Tensor" in str(a.type))


@functools.cache
def _tensor_lists(name: str) -> tuple[str, ...]:
    return tuple(a.name for a in _op(name)._schema.arguments if _is_list(a))


def _is_list(argument: Any) -> bool:
    """Return whether an argument is a list of tensors without optional elements."""
    return str(argument.type) == "List[Tensor]"


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def empty(operand: Operand, device: torch.device) -> Tensor:
    """Return an uninitialized tensor with the operand's shape and strides; 0 broadcasts."""
    shape, stride = ([int(n) for n in numbers] for numbers in (operand.shape, operand.stride))
    unexpanded = [1 if step == 0 else n for n, step in zip(shape, stride, strict=True)]
    return torch.empty_strided(
        unexpanded, stride, dtype=_dtype(operand.dtype), device=device
    ).expand(shape)


def _random(operand: Operand, device: torch.device, generator: torch.Generator) -> Tensor:
    result = empty(operand, device)
    unexpanded = result.as_strided(
        [1 if step == 0 else n for n, step in zip(result.shape, result.stride(), strict=True)],
        result.stride(),
    )
    if unexpanded.is_floating_point():
        unexpanded.copy_(torch.randn(unexpanded.shape, generator=generator, device=device))
    else:
        unexpanded.copy_(torch.randint(0, 2, unexpanded.shape, generator=generator, device=device))
    return result


def _last_factors(problem: Problem) -> list[tuple[int, int]]:
    """Return the last factor of each GEMM and the number of terms (K) of its sums."""
    packet = problem.op.split(".")[1]
    factors = _LAST_FACTORS.get(packet, (0,))
    return [(i, _terms(packet, i, [*map(int, problem.operands[i].shape)])) for i in factors]


def _terms(packet: str, last: int, shape: list[int]) -> int:
    if packet == "conv_weight_grad":  # The sums are over all pixels.
        return shape[0] * math.prod(shape[2:])
    return math.prod(shape[1:]) if packet in _BY_ROWS else shape[-2] if last else 1


_LAST_FACTORS: dict[str, tuple[int, ...]] = {
    "mm": (1,),
    "bmm": (1,),
    "addmm": (2,),
    "baddbmm": (2,),
    "convolution": (1,),
}
# Ops of `ipex::`.
_LAST_FACTORS |= {"conv": (1,), "conv_pool": (1,), "conv_shortcut": (1, 4), "linear": (1,)}
_LAST_FACTORS |= {"gated_linear": (1, 2), "conv_preactivated": (1,)}
# Ops whose weight has N as its first dimension and K in the others.
_BY_ROWS = {"convolution", "conv", "conv_pool", "conv_preactivated", "conv_shortcut"}
_BY_ROWS |= {"gated_linear", "linear"}

"""Run a problem: its op and epilogue as a function, and random operands."""

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch._subclasses import FakeTensorMode

import ipex_inductor.ops  # noqa: F401  what problems may be of
from ipex_inductor.autotune.ranges import points
from ipex_inductor.autotune.record import Constant, Operand, Problem

VARIANCE = "variance"  # A tensor of this name has only elements well above zero.
_CAST = re.compile(r"torch\.(float16|bfloat16|float32)\b")


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


def _constant(value: Constant) -> Any:
    """Return the op's argument from which `node_problem` made `value`."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return list(value) if isinstance(value, tuple) else value


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
    return tuple(a.name for a in _op(name)._schema.arguments if is_list(a))


def is_list(argument: Any) -> bool:
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
    factors = LAST_FACTORS.get(packet, (0,))
    return [(i, _terms(packet, i, [*map(int, problem.operands[i].shape)])) for i in factors]


def _terms(packet: str, last: int, shape: list[int]) -> int:
    if packet == "conv_weight_grad":  # The sums are over all pixels.
        return shape[0] * math.prod(shape[2:])
    return math.prod(shape[1:]) if packet in _BY_ROWS else shape[-2] if last else 1


LAST_FACTORS: dict[str, tuple[int, ...]] = {
    "mm": (1,),
    "bmm": (1,),
    "addmm": (2,),
    "baddbmm": (2,),
    "convolution": (1,),
}
# Ops of `ipex::`.
LAST_FACTORS |= {"conv": (1,), "conv_pool": (1,), "conv_shortcut": (1, 4), "linear": (1,)}
LAST_FACTORS |= {"gated_linear": (1, 2), "conv_preactivated": (1,)}
# Ops whose weight has N as its first dimension and K in the others.
_BY_ROWS = {"convolution", "conv", "conv_pool", "conv_preactivated", "conv_shortcut"}
_BY_ROWS |= {"gated_linear", "linear"}

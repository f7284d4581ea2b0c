"""Families of rules: one producer x every epilogue, as two tables."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ipex_inductor.ops.common.epilogue import BINARY, UNARY
from ipex_inductor.passes.engine.rule import Constant, Form, Rule, equal_shapes


@dataclass(frozen=True)
class Producer:
    """A product, `product(**arguments)`, that epilogues follow; `op` fuses it with its epilogue.

    `fused` returns the arguments of `op`, from the product's arguments and the epilogue: addend,
    binary, unary and scalars. `forms` give the arguments of each way to write the product. `when`
    returns why a match is refused, from its arguments, `binary` and `unary`.
    """

    name: str
    product: Callable[..., Tensor]
    op: Any
    fused: Callable[..., tuple[Any, ...]]
    forms: tuple[Form, ...]
    when: Callable[[Mapping[str, Any]], str | None]
    weights: tuple[str, ...] = ("weight",)
    note: str = ""
    training: bool = False


@dataclass(frozen=True)
class Activation:
    """One way to write a unary op of an epilogue, found by the aten op that it ends in.

    `unary` is a name of `ops/common/epilogue.py`, and `anchor` is that aten op.
    `fn` is set for another spelling than the table's own. Of its scalars, the `free` ones stand for
    any number; `fixed` holds the scalars that the spelling implies.
    """

    name: str
    unary: str
    anchor: str
    fn: Callable[..., Tensor] | None = None
    free: tuple[float, ...] = ()
    fixed: tuple[float, ...] = ()


def _simple(name: str, anchor: str = "") -> Activation:
    return Activation(name, name, anchor or name)


def _gelu_by_hand(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _gelu_tanh_by_hand(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


# A free scalar is a number that occurs nowhere else in any example. Aten drops arguments that equal
# the default, so F.elu(x) and F.elu(x, 0.5) are two spellings.
ACTIVATIONS = (
    _simple("abs"),
    Activation("clamp", "hardtanh", "clamp", torch.clamp, free=(-0.31, 0.73)),
    Activation("elu", "elu", "elu", free=(0.37,)),
    Activation("elu", "elu", "elu", F.elu, fixed=(1.0,)),
    _simple("exp"),
    _simple("gelu"),
    _simple("gelu_tanh", "gelu"),
    Activation("gelu_by_hand", "gelu", "erf", _gelu_by_hand),
    Activation("gelu_tanh_by_hand", "gelu_tanh", "tanh", _gelu_tanh_by_hand),
    _simple("hardsigmoid"),
    _simple("hardswish"),
    Activation("hardtanh", "hardtanh", "hardtanh", free=(-0.31, 0.73)),
    Activation("hardtanh", "hardtanh", "hardtanh", F.hardtanh, fixed=(-1.0, 1.0)),
    Activation("leaky_relu", "leaky_relu", "leaky_relu", free=(0.37,)),
    Activation("leaky_relu", "leaky_relu", "leaky_relu", F.leaky_relu, fixed=(0.01,)),
    _simple("log"),
    _simple("mish"),
    _simple("quick_gelu", "sigmoid"),
    _simple("relu"),
    _simple("round"),
    _simple("sigmoid"),
    Activation("sigmoid*mul", "silu", "sigmoid", lambda x: x * torch.sigmoid(x)),
    _simple("silu"),
    _simple("sqrt"),
    _simple("square", "pow"),
    Activation("pow", "pow", "pow", free=(2.43,)),  # after square, which it would match too
    _simple("tanh"),
)

ANCHORS = {activation.name: activation.anchor for activation in ACTIVATIONS}


def family(producer: Producer) -> tuple[Rule, ...]:
    """Return every rule of `producer`: + a tensor, + a tensor + relu, + each activation."""
    return (
        _binary(producer, "add", "relu"),
        *(_binary(producer, binary, "none") for binary in BINARY if binary != "none"),
        *(_unary(producer, activation) for activation in ACTIVATIONS),
    )


def _unary(producer: Producer, activation: Activation) -> Rule:
    scalars = {f"scalar{i}": Constant(value) for i, value in enumerate(activation.free)}
    fn = activation.fn or UNARY[activation.unary].fn

    def pattern(**arguments: Any) -> Tensor:
        values = _pop_values(arguments, scalars)
        return fn(producer.product(**arguments), *values)

    def replacement(**arguments: Any) -> tuple[Any, ...]:
        values = _pop_values(arguments, scalars) or activation.fixed
        return _build_arguments(producer, arguments, None, "none", activation.unary, values)

    epilogue = {"binary": "none", "unary": activation.unary}
    return _rule(
        producer, activation.name, activation.anchor, epilogue, pattern, replacement, scalars
    )


def _binary(producer: Producer, binary: str, unary: str) -> Rule:
    def pattern(other: Tensor, **arguments: Any) -> Tensor:
        return UNARY[unary].fn(BINARY[binary](producer.product(**arguments), other))

    def replacement(other: Any, **arguments: Any) -> tuple[Any, ...]:
        return _build_arguments(producer, arguments, other, binary, unary, ())

    name, anchor = (binary, binary) if unary == "none" else (f"{binary} + {unary}", unary)
    epilogue = {"binary": binary, "unary": unary}
    return _rule(producer, name, anchor, epilogue, pattern, replacement, {"other": None})


def _rule(
    producer: Producer,
    name: str,
    anchor: str,
    epilogue: Mapping[str, str],
    pattern: Callable[..., Tensor],
    replacement: Callable[..., tuple[Any, ...]],
    more: Mapping[str, Any],
) -> Rule:
    taken = producer.forms[0].example().keys()

    def when(values: Mapping[str, Any]) -> str | None:
        if "other" in values:
            product = producer.product(**{name: values[name] for name in taken})
            for operand in (values["other"], product):
                if not equal_shapes(operand, values["result"]):
                    return f"an operand is broadcast from {tuple(operand.shape)}"
        scalars = [values[name] for name in more if name != "other"]
        if not all(isinstance(scalar, (int, float)) for scalar in scalars):
            return "a parameter of the activation is not a number"
        if name == "clamp" and scalars[0] > scalars[1]:
            return "the lower bound is above the upper bound"
        return producer.when({**values, **epilogue})

    return Rule(
        equation=f"{producer.name} + {name} => {producer.op or 'left'}",
        pattern=pattern,
        replacement=replacement if producer.op else None,
        op=producer.op,
        forms=tuple(
            Form(form.needs, functools.partial(_example, producer, form, more))
            for form in producer.forms
        ),
        anchor=anchor,
        when=when,
        weights=producer.weights,
        note=producer.note,
        training=producer.training,
    )


def _example(producer: Producer, form: Form, more: Mapping[str, Any]) -> dict[str, Any]:
    arguments = form.example()
    if "other" not in more:
        return {**arguments, **more}
    plain = {k: v.value if isinstance(v, Constant) else v for k, v in arguments.items()}
    return {**arguments, "other": torch.empty_like(producer.product(**plain))}


def _pop_values(arguments: dict[str, Any], names: Mapping[str, Any]) -> tuple[float, ...]:
    """Remove the values of `names` from `arguments`; return them."""
    return tuple(arguments.pop(name) for name in names)


def _build_arguments(
    producer: Producer,
    arguments: Mapping[str, Any],
    other: Any,
    binary: str,
    unary: str,
    scalars: tuple[float, ...],
) -> tuple[Any, ...]:
    epilogue = (other, binary, unary, [float(scalar) for scalar in scalars])
    return producer.fused(*epilogue, **arguments)

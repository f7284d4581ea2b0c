"""Rules of linear layers: linear x epilogue, and the gated pair of linear layers."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.passes.engine.packable import why_not_linear
from ipex_inductor.passes.engine.rule import Constant, Form, Rule
from ipex_inductor.passes.fusion import library
from ipex_inductor.passes.fusion.epilogue import ANCHORS, Producer, family


def _build_arguments(*epilogue: Any, x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    return x, weight, bias, *epilogue, False


def _example(lead: tuple[int, ...], bias: bool) -> dict[str, Any]:
    """Return x [*lead, 16], weight [32, 16] and bias [32] or None; any sizes would do."""
    return {
        "x": torch.empty(*lead, 16),
        "weight": torch.empty(32, 16),
        "bias": torch.empty(32) if bias else None,
    }


def _has_kernel(values: Mapping[str, Any]) -> str | None:
    tensors = (values["weight"], values["bias"], values.get("other"))
    return why_not_linear(values["x"], *tensors)


def _has_call(values: Mapping[str, Any]) -> str | None:
    return (
        library.why_not("linear", values)
        if values["x"].device.type in library.GPUS
        else _has_kernel(values)
    )


LINEAR = Producer(
    name="linear",
    product=F.linear,
    op=torch.ops.ipex.linear.default,
    fused=_build_arguments,
    forms=tuple(
        Form(frozenset({"addmm" if bias else "mm"}), functools.partial(_example, lead, bias))
        for lead in ((4,), (2, 4))
        for bias in (True, False)
    ),
    when=_has_call,
)


def _gate_rule(unary: str) -> Rule:
    def pattern(
        x: Tensor, gate: Tensor, gate_bias: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return UNARY[unary].fn(F.linear(x, gate, gate_bias)) * F.linear(x, weight, bias)

    def replacement(
        x: Tensor, gate: Tensor, gate_bias: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        linear = torch.ops.ipex.linear
        opened = linear(x, gate, gate_bias, None, "none", unary, [], False)
        result: Tensor = linear(x, weight, bias, opened, "mul", "none", [], False)
        return result

    def when(values: Mapping[str, Any]) -> str | None:
        x, *tensors = (values[name] for name in ("x", "weight", "bias", "gate", "gate_bias"))
        if x.device.type in library.GPUS:
            return library.why_not_gated(x, *tensors)
        return why_not_linear(x, *tensors[:2]) or why_not_linear(x, *tensors[2:])

    return Rule(
        equation=f"{unary}(linear) * linear => ipex.linear, ipex.linear",
        pattern=pattern,
        replacement=replacement,
        forms=tuple(
            Form(form.needs | {"mul"}, functools.partial(_gated_example, form))
            for form in LINEAR.forms
        ),
        anchor=ANCHORS[unary],
        when=when,
        weights=("weight", "gate"),
    )


def _gated_example(form: Form) -> dict[str, Any]:
    layer, gate_layer = form.example(), form.example()
    gate = {"gate": gate_layer["weight"], "gate_bias": gate_layer["bias"]}
    return {"x": layer["x"], **gate, "weight": layer["weight"], "bias": layer["bias"]}


def _add_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor,
    shape: list[int],
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> Tensor:
    return F.layer_norm(F.linear(x, weight, bias) + other, shape, gamma, beta, eps)


def _normed_example(form: Form) -> dict[str, Any]:
    example = form.example()
    addend = torch.empty(*example["x"].shape[:-1], 32)
    norm = {"gamma": torch.empty(32), "beta": torch.empty(32), "eps": Constant(0.37)}
    return {**example, "other": addend, "shape": Constant([32]), **norm}


# Matches a sum that only the norm reads: a sum with other readers is written to memory anyway.
NORMED = Rule(
    equation="linear + add + layer_norm => left",
    pattern=_add_layer_norm,
    replacement=None,
    forms=tuple(
        Form(form.needs | {"add"}, functools.partial(_normed_example, form))
        for form in LINEAR.forms
    ),
    anchor="native_layer_norm",
    when=_has_kernel,
    weights=("weight",),
    note="Inductor adds and normalises in one kernel, rounding no sum "
    "(benchmarks/studies/add_norm.py)",
    claims=True,
)

RULES = (NORMED, *map(_gate_rule, ("silu", "gelu", "gelu_tanh")), *family(LINEAR))

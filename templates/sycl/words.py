"""The operations of `ops/common/epilogue.py` in C++: on a float `x`, with up to two scalars."""

from collections.abc import Sequence

from ipex_inductor.errors import ArgumentError

UNARY = {
    "none": "x",
    "abs": "math_::fabs(x)",
    "elu": "x > 0.f ? x : first * math_::expm1(x)",
    "exp": "math_::exp(x)",
    "gelu": "0.5f * x * (1.f + math_::erf(x * 0.70710678118654752f))",
    "gelu_tanh": "x * sigmoid(1.59576912160573072f * (x + 0.044715f * x * x * x))",
    "hardsigmoid": "between(x + 3.f, 0.f, 6.f) / 6.f",
    "hardswish": "x * between(x + 3.f, 0.f, 6.f) / 6.f",
    "hardtanh": "between(x, first, second)",
    "leaky_relu": "x > 0.f ? x : first * x",
    "log": "math_::log(x)",
    "mish": "x * math_::tanh(x > 20.f ? x : math_::log1p(math_::exp(x)))",
    "pow": "math_::pow(x, first)",
    "quick_gelu": "x * sigmoid(1.702f * x)",
    "relu": "x < 0.f ? 0.f : x",
    "round": "math_::rint(x)",
    "sigmoid": "sigmoid(x)",
    "silu": "x * sigmoid(x)",
    "sqrt": "math_::sqrt(x)",
    "square": "x * x",
    "tanh": "math_::tanh(x)",
}
BINARY = {"none": "x", "add": "x + other", "mul": "x * other", "sub": "x - other"}
USUAL = {"elu": (1.0,), "hardtanh": (-1.0, 1.0), "leaky_relu": (0.01,)}  # torch's defaults
GATED = "gated"


def functions(binary: str, unary: str) -> str:
    """Return definitions of `binary(x, other)` and `unary(x, first, second)`."""
    return (
        f"static inline float binary(float x, float other) {{ return {BINARY[binary]}; }}\n"
        "static inline float unary(float x, float first, float second) "
        f"{{ return {UNARY[unary]}; }}\n"
    )


def scalars(unary: str, given: Sequence[float]) -> tuple[float, float]:
    """Return the two scalars of `unary`, torch's defaults if not given.

    Raises `ArgumentError` for too many of them, or too few.
    """
    defaults = USUAL.get(unary, ())
    count = max(len(defaults), unary == "pow")
    if len(given) > count or (unary == "pow" and not given):
        raise ArgumentError(
            f"{count} scalars of {unary}", f"{[*given]}", "See ops/common/epilogue.py."
        )
    first, second = (*given, *defaults[len(given) :], 0.0, 0.0)[:2]
    return first, second

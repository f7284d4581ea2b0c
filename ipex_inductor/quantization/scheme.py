"""Schemes: how a layer is quantized, and which layer gets which scheme."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ipex_inductor.errors import QuantizationError
from ipex_inductor.ops.quant.fp8_steps import compute_step

Choices = tuple[tuple[str, "Scheme | None"], ...]

# Smallest scale, 2^-40. Tensors and channels of zeros get it, so no scale is zero. torch's 2^-23
# would round channels whose largest weight is below 1e-7 to zero; real networks have such channels.
MIN_SCALE = 2.0**-40


@dataclass(frozen=True)
class Scheme:
    """Settings by which one layer is quantized.

    `symmetric` activations are int8 with zero point 0, others uint8 with a zero point.
    `observer` is "min_max", "moving_average", "histogram" or "percentile"; `observer_args` are its
    keyword arguments. `per_channel` is about weights, which are always symmetric int8.
    `bias_correction` subtracts what rounded weights add to the mean output. It needs the mean
    inputs of calibration data: with scales from a file of IPEX biases stay as they are.
    `dtype` torch.float8_e4m3fn is for linear layers, with a scale for each output channel of a
    weight. Activations have one calibrated scale, or with `dynamic` a scale of each row in each
    call. With `weight_only` they are not rounded, and weights are stored in FP8.

    Raises:
        QuantizationError: for another dtype, or settings that do not go with it.
    """

    symmetric: bool = False
    observer: str = "histogram"
    observer_args: tuple[tuple[str, float], ...] = ()
    dynamic: bool = False
    per_channel: bool = True
    bias_correction: bool = False
    dtype: torch.dtype = torch.int8
    weight_only: bool = False

    @property
    def is_fp8(self) -> bool:
        """Return whether layers compute in FP8, or on weights in FP8."""
        return self.dtype is torch.float8_e4m3fn

    @property
    def name(self) -> str:
        """Return the name of the kernels that it asks for: "int8", "fp8" or "fp8 weights"."""
        return "fp8 weights" if self.weight_only else "fp8" if self.is_fp8 else "int8"

    def __post_init__(self) -> None:
        """Check that the dtype goes with the rest."""
        if self.dtype not in ADVICE:
            raise QuantizationError(
                "dtype torch.int8 or torch.float8_e4m3fn",
                str(self.dtype),
                "E5M2 has 2 bits of mantissa and is for gradients: use torch.float8_e4m3fn."
                if self.dtype is torch.float8_e5m2
                else "Choose one of these.",
            )
        for name, value in ADVICE[self.dtype].items():
            if getattr(self, name) is not value[0]:
                raise QuantizationError(
                    f"{name}={value[0]} in a scheme of {self.dtype}",
                    f"{name}={getattr(self, name)}",
                    value[1],
                )


# Values that a dtype asks for, by the name of the setting, and what to do about another one.
ADVICE: dict[torch.dtype, dict[str, tuple[bool, str]]] = {
    torch.int8: {
        "weight_only": (
            False,
            "Weights alone are stored in FP8: add dtype=torch.float8_e4m3fn.",
        ),
    },
    torch.float8_e4m3fn: {
        "per_channel": (True, "Each output channel of an FP8 weight has a scale of its own."),
        "bias_correction": (False, "Rounding to FP8 shifts no mean: leave it out."),
    },
}


@dataclass(frozen=True)
class Layer:
    """An operator call of a captured graph.

    `classes` are the qualified names of the classes of its module, the module's own class first,
    and of the modules around it.
    """

    name: str
    operator: str
    module_path: str
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SchemeMapping:
    """Schemes by layer, operator and class; None leaves a layer in floating point.

    The first that matches decides: the layer's name or the longest path of its module or of one
    around it (`by_module_name`), operator, class of the module or of one around it, default.
    """

    default: Scheme | None
    by_module_name: Choices = ()
    by_operator: Choices = ()
    by_module_class: Choices = ()

    def scheme_of(self, layer: Layer) -> Scheme | None:
        """Return the scheme of a layer, None to leave it in floating point."""
        names = dict(self.by_module_name)
        for name in [layer.name, *paths_around(layer.module_path)]:
            if name in names:
                return names[name]
        operators, classes = dict(self.by_operator), dict(self.by_module_class)
        if layer.operator in operators:
            return operators[layer.operator]
        return next((classes[c] for c in layer.classes if c in classes), self.default)


class TensorScale(NamedTuple):
    """Scale and zero point of a quantized activation; with `is_fp8` the zero point is 0."""

    scale: float
    zero_point: int
    symmetric: bool
    is_fp8: bool = False

    @property
    def dtype_name(self) -> str:
        """Return "int8", "uint8" or "fp8"."""
        return "fp8" if self.is_fp8 else "int8" if self.symmetric else "uint8"

    @property
    def bounds(self) -> tuple[int, int, torch.dtype]:
        """Return the smallest and the largest quantized value, and their dtype."""
        return (-128, 127, torch.int8) if self.symmetric else (0, 255, torch.uint8)


def paths_around(path: str) -> list[str]:
    """Return a module path and those of the modules around it, longest first, without the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def scale_of_range(low: float, high: float, symmetric: bool) -> TensorScale:
    """Return scale and zero point that cover a range, extended to contain zero.

    The scale is a value of float32, as the graph's buffers hold it.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    steps = 127.5 / max(high, -low, MIN_SCALE) if symmetric else 255 / max(high - low, MIN_SCALE)
    scale = torch.tensor(max(1 / steps, MIN_SCALE), dtype=torch.float32).item()
    zero_point = 0 if symmetric else min(max(round(-low / scale), 0), 255)
    return TensorScale(scale, zero_point, symmetric)


def fp8_scale_of_range(low: float, high: float) -> TensorScale:
    """Return the power of two by which a range fits E4M3: no value is saturated."""
    amax = torch.tensor(max(high, -low, 0.0), dtype=torch.float32)
    return TensorScale(max(compute_step(amax).item(), MIN_SCALE), 0, True, True)

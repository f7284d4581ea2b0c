"""Settings of weight-only quantization, with the names and numbers of IPEX."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from ipex_inductor.errors import ArgumentError, QuantizationError
from ipex_inductor.reporting.decisions import warn_once


class WoqWeightDtype(IntEnum):
    """Types in which weights are stored."""

    INT8 = 1
    INT4 = 2
    NF4 = 3
    FP8 = 4


class WoqLowpMode(IntEnum):
    """Precision of the GEMM. NONE computes in the dtype of the activations."""

    NONE = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3


class WoqActQuantMode(IntEnum):
    """Activations that share a scale in `WoqLowpMode.INT8`: IC is K, BATCH are the rows."""

    NONE = -1
    PER_TENSOR = 0
    PER_IC_BLOCK = 1
    PER_BATCH = 2
    PER_BATCH_IC_BLOCK = 3
    PER_TENSOR_SYM = 4
    PER_IC_BLOCK_SYM = 5
    PER_BATCH_SYM = 6
    PER_BATCH_IC_BLOCK_SYM = 7


class WoqWeightQScheme(IntEnum):
    """Rounding of weights: with zero points, or symmetric around zero."""

    UNDEFINED = 0
    ASYMMETRIC = 1
    SYMMETRIC = 2


# Names of the op's argument `weight_dtype`.
STORAGE = {
    WoqWeightDtype.INT8: "int8",
    WoqWeightDtype.INT4: "int4",
    WoqWeightDtype.NF4: "nf4",
    WoqWeightDtype.FP8: "fp8",
}
# Names of the op's argument `compute`; "" is the dtype of the activations.
COMPUTE = {
    WoqLowpMode.NONE: "",
    WoqLowpMode.FP16: "float16",
    WoqLowpMode.BF16: "bfloat16",
    WoqLowpMode.INT8: "int8",
}
# Types that scripts for early releases of IPEX pass.
OLD_DTYPES = {torch.qint8: WoqWeightDtype.INT8, torch.quint4x2: WoqWeightDtype.INT4}
WITHOUT_ZERO_POINTS = (WoqWeightDtype.NF4, WoqWeightDtype.FP8)
SYMMETRIC, ASYMMETRIC = WoqWeightQScheme.SYMMETRIC, WoqWeightQScheme.ASYMMETRIC


@dataclass(frozen=True)
class QConfigWoq:
    """Settings of weight-only quantization for a layer.

    `group_size` is the number of consecutive weights of a row that share a scale: -1 is the whole
    row, else a power of two. The last group of a row may be shorter. `weight_qscheme` UNDEFINED
    becomes SYMMETRIC for NF4, FP8, and INT8 weights with `lowp_mode` INT8, else ASYMMETRIC.
    `cache_weight_for_large_batch` is accepted: the kernels need no second copy of a weight.

    Raises:
        QuantizationError: for settings that do not go together; the message names others.
    """

    weight_dtype: WoqWeightDtype = WoqWeightDtype.INT8
    lowp_mode: WoqLowpMode = WoqLowpMode.NONE
    act_quant_mode: WoqActQuantMode = WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM
    group_size: int = -1
    weight_qscheme: WoqWeightQScheme = WoqWeightQScheme.UNDEFINED
    cache_weight_for_large_batch: bool = False

    def __post_init__(self) -> None:
        """Resolve old types and the undefined scheme, and check all of them together."""
        for name, kind in _KINDS.items():
            object.__setattr__(self, name, _member(name, kind, getattr(self, name)))
        _check_group_size(self.group_size)
        only_symmetric = _needs_symmetry(self)
        if self.weight_qscheme is WoqWeightQScheme.UNDEFINED:
            scheme = SYMMETRIC if only_symmetric else ASYMMETRIC
            object.__setattr__(self, "weight_qscheme", scheme)
        if self.weight_qscheme is ASYMMETRIC and only_symmetric:
            raise QuantizationError(
                f"symmetric weights: {only_symmetric}",
                "weight_qscheme=ASYMMETRIC",
                "Pass WoqWeightQScheme.SYMMETRIC, or leave it out.",
            )
        _check_int8_computation(self)

    @property
    def is_symmetric(self) -> bool:
        """Return whether weights have no zero points."""
        return self.weight_qscheme is SYMMETRIC

    @property
    def storage(self) -> str:
        """Return the op's name of the weight's type."""
        return STORAGE[self.weight_dtype]

    @property
    def compute(self) -> str:
        """Return the op's name of the GEMM's type, "" for that of the activations."""
        return COMPUTE[self.lowp_mode]


_KINDS: dict[str, type[IntEnum]] = {
    "weight_dtype": WoqWeightDtype,
    "lowp_mode": WoqLowpMode,
    "act_quant_mode": WoqActQuantMode,
    "weight_qscheme": WoqWeightQScheme,
}


def _member(name: str, kind: type[IntEnum], value: Any) -> IntEnum:
    """Return a setting as a member of its enumeration.

    Raises:
        ArgumentError: for a value that the enumeration has not.
    """
    if kind is WoqWeightDtype and isinstance(value, torch.dtype) and value in OLD_DTYPES:
        member = OLD_DTYPES[value]
        warn_once(f"{name}={value} is an old form: use {kind.__name__}.{member.name}")
        return member
    try:
        return kind(value)
    except (ValueError, TypeError):
        names = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise ArgumentError(f"{name} out of {names}", repr(value), "Pass one of them.") from None


def _check_group_size(size: Any) -> None:
    """Raise `QuantizationError` unless a group size is -1 or a power of two."""
    is_size = isinstance(size, int) and not isinstance(size, bool)
    if not is_size or (size != -1 and (size <= 0 or size & (size - 1))):
        raise QuantizationError(
            "group_size -1 (a scale for each output channel) or a power of two",
            repr(size),
            "Common sizes are 32, 64 and 128.",
        )


def _needs_symmetry(qconfig: QConfigWoq) -> str:
    """Return why weights must be symmetric, "" if they need not be."""
    if qconfig.weight_dtype in WITHOUT_ZERO_POINTS:
        return f"{qconfig.weight_dtype.name} has no zero points"
    if qconfig.weight_dtype is WoqWeightDtype.INT8 and qconfig.lowp_mode is WoqLowpMode.INT8:
        return "sums of INT8 weights and INT8 activations take no zero points"
    return ""


def _check_int8_computation(qconfig: QConfigWoq) -> None:
    """Raise `QuantizationError` for settings that no kernel computes in INT8."""
    if qconfig.lowp_mode is not WoqLowpMode.INT8:
        return  # act_quant_mode has no effect
    if qconfig.weight_dtype in WITHOUT_ZERO_POINTS:
        raise QuantizationError(
            "INT8 or INT4 weights for lowp_mode INT8, which multiplies integers",
            f"{qconfig.weight_dtype.name} weights",
            "Pass WoqLowpMode.BF16, or WoqWeightDtype.INT8.",
        )
    if qconfig.act_quant_mode is not WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM:
        raise QuantizationError(
            "act_quant_mode PER_BATCH_IC_BLOCK_SYM for lowp_mode INT8: symmetric activations with a"
            " scale for each row and group, the finest of the modes",
            qconfig.act_quant_mode.name,
            "Pass WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM, or WoqLowpMode.BF16.",
        )


def is_weight_only(configure: Any) -> bool:
    """Return whether a mapping or a single setting is one of weight-only quantization."""
    return any(isinstance(qconfig, QConfigWoq) for qconfig in _settings(configure))


def _settings(configure: Any) -> Iterator[Any]:
    """Yield all settings of a mapping, or the single setting itself."""
    if not hasattr(configure, "global_qconfig"):
        yield configure
        return
    yield configure.global_qconfig
    for table in ("object_type", "module_name_regex", "module_name"):
        yield from getattr(configure, f"{table}_qconfigs").values()


@dataclass(frozen=True)
class WoqMapping:
    """Settings by path, regular expression and class of a module, and one for all others."""

    default: QConfigWoq | None
    by_name: Mapping[str, QConfigWoq | None] = field(default_factory=dict)
    by_pattern: Mapping[str, QConfigWoq | None] = field(default_factory=dict)
    by_class: Mapping[Any, QConfigWoq | None] = field(default_factory=dict)

    def choose(self, name: str, module: nn.Module) -> QConfigWoq | None:
        """Return the setting of a layer, None to leave it in floating point.

        The first that matches decides: the path of the module or of one around it, a regular
        expression, the class of the module, the default.
        """
        parts = name.split(".") if name else []
        paths = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        for path in paths:
            if path in self.by_name:
                return self.by_name[path]
        for pattern, qconfig in self.by_pattern.items():
            if any(re.match(pattern, path) for path in paths):
                return qconfig
        classes = (kind for kind in type(module).__mro__ if kind in self.by_class)
        return next((self.by_class[kind] for kind in classes), self.default)


def read_mapping(configure: Any) -> WoqMapping:
    """Return the settings of a `QConfigMapping`, ours or torch's, or of a single `QConfigWoq`.

    Raises:
        QuantizationError: if other settings than `QConfigWoq` and None are in it.
    """
    if isinstance(configure, WoqMapping):
        return configure
    others = [q for q in _settings(configure) if not isinstance(q, QConfigWoq | None)]
    ordered = getattr(configure, "module_name_object_type_order_qconfigs", {})
    if others or ordered or configure is None:
        raise QuantizationError(
            "a mapping of QConfigWoq and None",
            "one of calls" if ordered and not others else repr(others[0] if others else None),
            "Quantize activations of other layers in a second step, by a mapping of their own.",
        )
    if isinstance(configure, QConfigWoq):
        return WoqMapping(configure)
    return WoqMapping(
        configure.global_qconfig,
        dict(configure.module_name_qconfigs),
        dict(configure.module_name_regex_qconfigs),
        dict(configure.object_type_qconfigs),
    )

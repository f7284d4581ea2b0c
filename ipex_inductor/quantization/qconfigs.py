"""Settings of quantization: ours, and what is read from QConfig objects of `torch.ao`.

Nothing of `torch.ao` is imported: its objects are recognised by the names of their classes.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from ipex_inductor.errors import QuantizationError
from ipex_inductor.quantization.files.summary import plain_operator
from ipex_inductor.quantization.scheme import Choices, Layer, Scheme, SchemeMapping
from ipex_inductor.quantization.weight_only.qconfig import (
    QConfigWoq,
    WoqActQuantMode,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightQScheme,
)
from ipex_inductor.reporting import decisions


@dataclass(frozen=True)
class SmoothQuant:
    """Settings of SmoothQuant: factors x_max^alpha / w_max^(1 - alpha) of each input channel.

    With `share`, linear layers that read one tensor share the factors.
    """

    alpha: float = 0.5
    share: bool = True


default_static_qconfig = Scheme(observer="histogram", bias_correction=True)
"""Affine uint8 activations by a histogram, int8 weights for each channel, corrected biases.

`python -m benchmarks int8_accuracy` compares it with other recipes on real networks.
"""

default_dynamic_qconfig = Scheme(symmetric=True, dynamic=True)
"""Symmetric int8 activations with a scale for each row, computed in each call."""

# Observer classes of torch.ao by name, and ours.
OBSERVERS = {
    "HistogramObserver": "histogram",
    "MovingAverageMinMaxObserver": "moving_average",
    "MinMaxObserver": "min_max",
    "PercentileObserver": "percentile",
}
ARGUMENTS = {
    "histogram": {"bins": "bins"},
    "moving_average": {"averaging_constant": "averaging_constant"},
    "percentile": {"percentile": "percentile"},
}
WEIGHT_OBSERVERS = {
    "MovingAveragePerChannelMinMaxObserver": True,
    "PerChannelMinMaxObserver": True,
    "MovingAverageMinMaxObserver": False,
    "MinMaxObserver": False,
}
BYTES = {"quint8": (0, 255), "uint8": (0, 255), "qint8": (-128, 127), "int8": (-128, 127)}


class QConfigMapping:
    """Settings by object type and module name, with the methods of torch's `QConfigMapping`.

    A setting is a `Scheme`, a QConfig of `torch.ao`, or None: those layers stay in floating point.
    """

    def __init__(self) -> None:
        self.global_qconfig: Any = None
        self.smooth_quant: SmoothQuant | None = None
        self.object_type_qconfigs: OrderedDict[Any, Any] = OrderedDict()
        self.module_name_regex_qconfigs: OrderedDict[str, Any] = OrderedDict()
        self.module_name_qconfigs: OrderedDict[str, Any] = OrderedDict()
        self.module_name_object_type_order_qconfigs: OrderedDict[tuple[str, Any, int], Any] = (
            OrderedDict()
        )

    def set_global(self, global_qconfig: Any) -> "QConfigMapping":
        """Set what holds for layers without a setting of their own."""
        self.global_qconfig = global_qconfig
        return self

    def set_object_type(self, object_type: Any, qconfig: Any) -> "QConfigMapping":
        """Set what holds for a module class, a function, or an operator by its name."""
        self.object_type_qconfigs[object_type] = qconfig
        return self

    def set_module_name_regex(self, module_name_regex: str, qconfig: Any) -> "QConfigMapping":
        """Set what holds for modules whose path matches a regular expression."""
        self.module_name_regex_qconfigs[module_name_regex] = qconfig
        return self

    def set_module_name(self, module_name: str, qconfig: Any) -> "QConfigMapping":
        """Set what holds for one module, and the modules in it."""
        self.module_name_qconfigs[module_name] = qconfig
        return self

    def set_module_name_object_type_order(
        self, module_name: str, object_type: Any, index: int, qconfig: Any
    ) -> "QConfigMapping":
        """Set what holds for the `index`-th call of a function in one module."""
        self.module_name_object_type_order_qconfigs[module_name, object_type, index] = qconfig
        return self


default_static_qconfig_mapping = QConfigMapping().set_global(default_static_qconfig)
"""`default_static_qconfig` for every layer."""

default_dynamic_qconfig_mapping = QConfigMapping().set_global(default_dynamic_qconfig)
"""`default_dynamic_qconfig` for every layer."""


def get_smooth_quant_qconfig_mapping(
    alpha: float = 0.5,
    act_observer: Any = None,
    act_ic_observer: Any = None,
    wei_observer: Any = None,
    wei_ic_observer: Any = None,
    share_weight_observers: bool = True,
) -> QConfigMapping:
    """Return settings by which linear layers are smoothed before they are quantized.

    Args:
        alpha: 0 moves no spread from activations to weights, 1 all of it.
        act_observer: a maker of observers of activations, of `torch.ao`.
        act_ic_observer: for the channels of activations, a `PerChannelMinMaxObserver`.
        wei_observer: for weights, min-max for each output channel.
        wei_ic_observer: for their input channels, a `PerChannelMinMaxObserver`.
        share_weight_observers: linear layers that read one tensor share their factors.

    Raises:
        QuantizationError: for an observer or an alpha that cannot be used.
    """
    if not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        advice = "`autotune` with smoothquant_args tries several."
        _refuse("an alpha between 0 and 1", repr(alpha), advice)
    for make in (act_ic_observer, wei_ic_observer):
        if make is not None:
            _kind(_observer(make), ("PerChannelMinMaxObserver",), "input channels")
    scheme = replace(default_static_qconfig, bias_correction=False)
    if act_observer is not None:
        scheme = _read_activation(_observer(act_observer))
    if wei_observer is not None:
        scheme = replace(scheme, per_channel=_read_weight(_observer(wei_observer)))
    mapping = QConfigMapping().set_global(scheme)
    mapping.smooth_quant = SmoothQuant(float(alpha), share_weight_observers)
    return mapping


def get_weight_only_quant_qconfig_mapping(
    *,
    weight_dtype: WoqWeightDtype = WoqWeightDtype.INT8,
    lowp_mode: WoqLowpMode = WoqLowpMode.NONE,
    act_quant_mode: WoqActQuantMode = WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM,
    group_size: int = -1,
    weight_qscheme: WoqWeightQScheme = WoqWeightQScheme.UNDEFINED,
) -> QConfigMapping:
    """Return a mapping that quantizes the weights of all linear layers.

    Args:
        weight_dtype: type of the stored weights.
        lowp_mode: precision of the GEMM. INT8 quantizes activations in each call.
        act_quant_mode: granularity of activations in lowp_mode INT8; without effect elsewhere.
        group_size: weights of a row that share a scale, -1 for the whole row.
        weight_qscheme: UNDEFINED is asymmetric where the other settings allow it.

    Raises:
        QuantizationError: for settings that do not go together.
        ArgumentError: for a value of no such enumeration.
    """
    qconfig = QConfigWoq(weight_dtype, lowp_mode, act_quant_mode, group_size, weight_qscheme)
    return QConfigMapping().set_global(qconfig)


def read_qconfig(qconfig: Any) -> Scheme | None:
    """Return the scheme that a QConfig of `torch.ao` describes; ours, and None, are returned.

    Raises:
        QuantizationError: for an observer, a type or a range that no kernel here has.
    """
    if qconfig is None or isinstance(qconfig, Scheme):
        return qconfig
    if not callable(getattr(qconfig, "activation", None)):
        _refuse("a QConfig with the makers `activation` and `weight`", repr(qconfig))
    scheme = _read_activation(_observer(qconfig.activation))
    per_channel = _read_weight(_observer(qconfig.weight))
    return replace(scheme, per_channel=per_channel, bias_correction=not scheme.dynamic)


def _read_activation(activation: Any) -> Scheme:
    kind = _kind(activation, (*OBSERVERS, "PlaceholderObserver"), "activations")
    if kind == "PlaceholderObserver" or getattr(activation, "is_dynamic", False):
        return _read_dynamic(activation)
    _check_range(activation, "activations")
    name = OBSERVERS[kind]
    return Scheme(
        symmetric="symmetric" in str(activation.qscheme),
        observer=name,
        observer_args=_arguments(activation, ARGUMENTS.get(name, {})),
    )


def _observer(make: Any) -> Any:
    """Return the observer that a QConfig makes, or the one in its fake quantization."""
    made_observer = make()
    return getattr(made_observer, "activation_post_process", made_observer)


def _kind(observer: Any, names: tuple[str, ...], purpose: str) -> str:
    """Return the first of `names` that is a class of the observer."""
    kinds = [kind.__name__ for kind in type(observer).__mro__ if kind.__name__ in names]
    if not kinds:
        _refuse(f"an observer of {purpose} out of {', '.join(names)}", type(observer).__name__)
    return kinds[0]


def _read_dynamic(activation: Any) -> Scheme:
    """Return the dynamic scheme. IPEX wrote its type in `compute_dtype` beside a float type."""
    dtype = getattr(activation, "dtype", torch.quint8)
    if dtype not in (torch.float32, torch.quint8, torch.qint8, torch.uint8, torch.int8):
        _refuse("dynamic quantization to 8 bits", str(dtype))
    return Scheme(symmetric=True, dynamic=True)


def _read_weight(observer: Any) -> bool:
    """Return whether weights have a scale for each channel.

    Raises:
        QuantizationError: for weights that are not symmetric int8 over the whole range.
    """
    kind = _kind(observer, tuple(WEIGHT_OBSERVERS), "weights")
    if "symmetric" not in str(observer.qscheme) or _type_name(observer.dtype) != "qint8":
        _refuse("symmetric int8 weights", f"{observer.dtype} with {observer.qscheme}")
    _check_range(observer, "weights")
    if getattr(observer, "ch_axis", 0) != 0:
        _refuse("weights with their channels along axis 0", f"ch_axis={observer.ch_axis}")
    return WEIGHT_OBSERVERS[kind]


def _check_range(observer: Any, purpose: str) -> None:
    """Raise if the observer is not of 8 bits, or has a range of its own.

    `reduce_range` guards kernels whose sums overflow. Those here do not, so it is not needed.
    """
    whole = BYTES.get(_type_name(observer.dtype))
    if whole is None:
        _refuse(f"8-bit {purpose}", str(observer.dtype))
    if getattr(observer, "reduce_range", False):
        decisions.log.info("reduce_range: %s keep the whole range %s", purpose, whole)
        return
    lowest, highest = (getattr(observer, name, None) for name in ("quant_min", "quant_max"))
    if (lowest, highest) not in (whole, (None, None)):
        _refuse(
            f"{purpose} over the whole range {whole}",
            f"the range ({lowest}, {highest})",
            "Build the observer without quant_min and quant_max.",
        )


def _type_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return "qint8" if name == "int8" else name


def _arguments(observer: Any, names: dict[str, str]) -> tuple[tuple[str, float], ...]:
    values = ((ours, getattr(observer, name, None)) for name, ours in names.items())
    return tuple((name, value) for name, value in values if value is not None)


def _refuse(expected: str, received: str, advice: str = "") -> NoReturn:
    advice = advice or "Use `ipex_inductor.quantization.default_static_qconfig`, or such a one."
    raise QuantizationError(expected, received, advice)


@dataclass(frozen=True)
class PatternMapping(SchemeMapping):
    """A mapping with regular expressions of module paths, which come after exact names."""

    by_pattern: Choices = ()

    def scheme_of(self, layer: Layer) -> Scheme | None:
        """Return the scheme of a layer, None to leave it in floating point."""
        parts = layer.module_path.split(".")
        paths = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        names = {name for name, _ in self.by_module_name}
        if names.isdisjoint([layer.name, *paths]):
            for pattern, scheme in self.by_pattern:
                if any(re.match(pattern, path) for path in paths):
                    return scheme
        return super().scheme_of(layer)


def read_mapping(configure: Any) -> SchemeMapping:
    """Return the mapping that a QConfigMapping or a single QConfig describes.

    Both are ours or those of `torch.ao`. Every kind of its settings counts.

    Raises:
        QuantizationError: for anything else, or settings that no kernel here has.
    """
    if isinstance(configure, SchemeMapping):
        return configure
    if not hasattr(configure, "global_qconfig"):
        return SchemeMapping(read_qconfig(configure))
    types = [(key, read_qconfig(value)) for key, value in _items(configure.object_type_qconfigs)]
    ordered = configure.module_name_object_type_order_qconfigs
    calls = [
        (f"{path}:{operator_name(kind)}:{index}", read_qconfig(value))
        for (path, kind, index), value in _items(ordered)
    ]
    return PatternMapping(
        default=read_qconfig(configure.global_qconfig),
        by_module_name=(*calls, *_read(configure.module_name_qconfigs)),
        by_operator=tuple((operator_name(k), v) for k, v in types if not isinstance(k, type)),
        by_module_class=tuple((_class_name(k), v) for k, v in types if isinstance(k, type)),
        by_pattern=_read(configure.module_name_regex_qconfigs),
    )


def switch_off(mapping: SchemeMapping, layers: Iterable[str]) -> SchemeMapping:
    """Return the mapping with these layers, named as in a report, left in floating point."""
    choices = tuple((name, None) for name in layers)
    return replace(mapping, by_module_name=(*mapping.by_module_name, *choices))


def is_dynamic(mapping: SchemeMapping) -> bool:
    """Return whether a mapping is that of dynamic quantization.

    Raises:
        QuantizationError: if some settings are dynamic and others static.
    """
    rows = (mapping.by_module_name, mapping.by_operator, mapping.by_module_class)
    patterns = mapping.by_pattern if isinstance(mapping, PatternMapping) else ()
    choices = [scheme for row in (*rows, patterns) for _, scheme in row]
    kinds = {scheme.dynamic for scheme in [mapping.default, *choices] if scheme is not None}
    if len(kinds) > 1:
        advice = "Quantize twice, or choose one kind and None for the other layers."
        _refuse("static or dynamic settings", "both in one mapping", advice)
    return kinds == {True}


def operator_name(kind: Any) -> str:
    """Return the operator of a function, a module class, or a name: `F.conv2d` is "conv2d"."""
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return plain_operator(name)


def _items(table: Any) -> list[tuple[Any, Any]]:
    return list(table.items())


def _read(table: Any) -> Choices:
    return tuple((name, read_qconfig(qconfig)) for name, qconfig in table.items())


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

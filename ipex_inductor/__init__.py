"""ipex_inductor: the torch.compile backend `ipex` and its tools.

Importing this package is cheap: no compilation, no folder, no torch internals until first use.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ipex_inductor.ipex_api.moved import MOVED, keep_old_names
from ipex_inductor.reporting.decisions import report
from ipex_inductor.runtime.gc_pause import pause_while_dynamo_is_imported

if TYPE_CHECKING:
    from ipex_inductor.aot_cache.use import use_bundle as use_bundle
    from ipex_inductor.compiler.recording import record as record
    from ipex_inductor.cpu.verbose import VERBOSE_OFF as VERBOSE_OFF
    from ipex_inductor.cpu.verbose import VERBOSE_ON as VERBOSE_ON
    from ipex_inductor.cpu.verbose import VERBOSE_ON_CREATION as VERBOSE_ON_CREATION
    from ipex_inductor.cpu.verbose import verbose as verbose
    from ipex_inductor.frontend import disable_auto_channels_last as disable_auto_channels_last
    from ipex_inductor.frontend import enable_auto_channels_last as enable_auto_channels_last
    from ipex_inductor.frontend import optimize as optimize
    from ipex_inductor.inspection.explanation import Explanation
    from ipex_inductor.ipex_api.math_mode import FP32MathMode as FP32MathMode
    from ipex_inductor.ipex_api.math_mode import get_fp32_math_mode as get_fp32_math_mode
    from ipex_inductor.ipex_api.math_mode import set_fp32_math_mode as set_fp32_math_mode
    from ipex_inductor.ipex_api.switches import enable_onednn_fusion as enable_onednn_fusion
    from ipex_inductor.ipex_api.switches import set_logging_level as set_logging_level
    from ipex_inductor.ipex_api.switches import version as version
    from ipex_inductor.llm import optimize_transformers as optimize_transformers
    from ipex_inductor.prebuild.exporting import package as package
    from ipex_inductor.prebuild.loading import load as load
    from ipex_inductor.quantization import QuantConf as QuantConf
    from ipex_inductor.quantization import calibrate as calibrate

__version__ = "0.2.0"

pause_while_dynamo_is_imported()
keep_old_names()

# Modules imported at first use of their names.
_HOMES = {
    "ipex_inductor.aot_cache.use": ("use_bundle",),
    "ipex_inductor.cpu.verbose": (
        *("VERBOSE_OFF", "VERBOSE_ON", "VERBOSE_ON_CREATION"),
        "verbose",
    ),
    "ipex_inductor.frontend": (
        "disable_auto_channels_last",
        "enable_auto_channels_last",
        "optimize",
    ),
    "ipex_inductor.ipex_api.math_mode": (
        "FP32MathMode",
        "get_fp32_math_mode",
        "set_fp32_math_mode",
    ),
    "ipex_inductor.llm": ("optimize_transformers",),
    "ipex_inductor.prebuild.exporting": ("package",),
    "ipex_inductor.quantization": ("QuantConf", "calibrate"),
    "ipex_inductor.prebuild.loading": ("load",),
    "ipex_inductor.compiler.recording": ("record",),
    "ipex_inductor.ipex_api.switches": ("enable_onednn_fusion", "set_logging_level", "version"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = frozenset({"cpu", "frontend", "llm", "nn", "optim", "quantization", "xpu"})

__all__ = ["derived_memory", "explain", "refresh", "report", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"ipex_inductor.{name}")
    if f"ipex_inductor.{name}" in MOVED:
        return import_module(f"ipex_inductor.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ipex_inductor' has no attribute {name!r}")


def refresh(model: Any = None) -> int:
    """Recompute everything derived from the weights of `model` when it is next used.

    For writes that cannot be detected, such as a few elements through a raw pointer. Nothing is
    compiled.

    Args:
        model: a module, a compiled module, or None for every weight of the process.

    Returns:
        The number of tensors to be recomputed.

    Raises:
        ArgumentError: for anything else.
    """
    from ipex_inductor.passes.weights import derived

    return derived.refresh(model)


def derived_memory() -> int:
    """Return the bytes that this process holds in tensors derived from weights.

    Such tensors are folded, cast or packed weights.
    """
    from ipex_inductor.passes.weights import derived

    return derived.derived_memory()


def explain(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> "Explanation":
    """Explain what backend `ipex` does to `model` and why; returns an `Explanation`.

    `print(ipex_inductor.explain(model, x))` runs the model once and shows a table of each graph.
    See `ipex_inductor.inspection.explanation.explain`.

    Args:
        model: a module or another callable.
        inputs: positional arguments of the model.
        kwargs: `compile_args` of `torch.compile`, and keyword arguments of the model.
    """
    from ipex_inductor.inspection import explanation

    return explanation.explain(model, *inputs, **kwargs)

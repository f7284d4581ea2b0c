"""ipex_inductor: the torch.compile backend `ipex`, and what surrounds it.

Importing this package is cheap: no compilation, no folder, no torch internals until first use.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ipex_inductor import report  # a module, and a function too

if TYPE_CHECKING:
    from ipex_inductor.explanation import Explanation
    from ipex_inductor.frontend import disable_auto_channels_last as disable_auto_channels_last
    from ipex_inductor.frontend import enable_auto_channels_last as enable_auto_channels_last
    from ipex_inductor.frontend import optimize as optimize

__version__ = "0.1.0"

__all__ = [
    "derived_memory",
    "disable_auto_channels_last",
    "enable_auto_channels_last",
    "explain",
    "optimize",
    "refresh",
    "report",
]

# Imported at first use, with all that they need.
_HOMES = {
    "optimize": "ipex_inductor.frontend",
    "enable_auto_channels_last": "ipex_inductor.frontend",
    "disable_auto_channels_last": "ipex_inductor.frontend",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ipex_inductor' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def refresh(model: Any = None) -> int:
    """Have all that was derived from weights of `model` computed anew when it is next used.

    For writes torch cannot see: `p.data.add_()`, numpy views, raw pointers, DLPack. Nothing is
    compiled. `model`: a module, a compiled module, or None for every weight of the process. Returns
    how many tensors that concerns. Raises `ArgumentError` for anything else.
    """
    from ipex_inductor.passes import derived

    return derived.refresh(model)


def derived_memory() -> int:
    """Bytes now held by tensors derived from weights (folded, cast, packed), in this process."""
    from ipex_inductor.passes import derived

    return derived.derived_memory()


def explain(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> "Explanation":
    """What backend `ipex` does to `model` and why; see `ipex_inductor.explanation.explain`.

    `print(ipex_inductor.explain(model, x))` runs the model once and shows a table of each graph.
    """
    from ipex_inductor import explanation

    return explanation.explain(model, *inputs, **kwargs)

"""ipex_inductor: the torch.compile backend `ipex`, and what surrounds it.

Importing this package is cheap: no compilation, no folder, no torch internals until first use.
"""

from typing import Any

__version__ = "0.1.0"


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

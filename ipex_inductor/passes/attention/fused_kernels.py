"""Which of torch's kernels attention gets, and how a mask must lie for there to be one."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether torch chose a kernel; else it multiplies and normalises, as is done by hand."""

    fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.fused |= name.startswith("_scaled_dot_product_") and not name.endswith("_math")
        return func(*args, **(kwargs or {}))


def lies_apart(mask: Tensor) -> bool:
    """Whether a mask on a GPU is none of torch's kernels': its columns are not side by side."""
    sizes = (*mask.shape, *mask.stride())
    known = all(isinstance(size, int) for size in sizes)
    return known and mask.device.type == "cuda" and mask.dim() > 1 and mask.stride(-1) != 1


def side_by_side(mask: Tensor) -> Tensor:
    """A copy whose columns are, of all that differs: along what only repeats one is enough."""
    for name, *given in side_by_side_calls(mask):
        mask = getattr(mask, name)(*given)
    return mask


def side_by_side_calls(mask: Tensor) -> list[tuple[Any, ...]]:
    """The methods, with their arguments, that copy it so."""
    pairs = enumerate(zip(mask.shape[:-1], mask.stride()[:-1], strict=True))
    repeated = [dim for dim, (size, stride) in pairs if size > 1 and stride == 0]
    return [*(("narrow", dim, 0, 1) for dim in repeated), ("contiguous",)]

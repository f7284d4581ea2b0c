"""Find out which of torch's attention kernels runs, and the mask layout that it needs."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record whether torch runs a fused attention kernel.

    Without one, torch multiplies and normalises as handwritten attention does.
    """

    fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.fused |= name.startswith("_scaled_dot_product_") and not name.endswith("_math")
        return func(*args, **(kwargs or {}))


def lies_apart(mask: Tensor) -> bool:
    """Return whether a mask on a GPU is in a layout that no kernel of torch's reads.

    Torch's kernels need columns side by side (stride 1 in the last dimension).
    """
    sizes = (*mask.shape, *mask.stride())
    is_static = all(isinstance(size, int) for size in sizes)
    return is_static and mask.device.type == "cuda" and mask.dim() > 1 and mask.stride(-1) != 1


def side_by_side(mask: Tensor) -> Tensor:
    """Return a copy of a mask whose columns are side by side.

    Along an expanded dimension (stride 0) only one element is copied.
    """
    for name, *args in side_by_side_calls(mask):
        mask = getattr(mask, name)(*args)
    return mask


def side_by_side_calls(mask: Tensor) -> list[tuple[Any, ...]]:
    """Return the method calls of `side_by_side`: tuples of a method's name and its arguments."""
    pairs = enumerate(zip(mask.shape[:-1], mask.stride()[:-1], strict=True))
    repeated = [dim for dim, (size, stride) in pairs if size > 1 and stride == 0]
    return [*(("narrow", dim, 0, 1) for dim in repeated), ("contiguous",)]

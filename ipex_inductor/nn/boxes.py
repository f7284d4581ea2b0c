"""torchvision's box operators, under their names in IPEX."""

import importlib
import importlib.util
from typing import Any

from torch import Tensor, nn

from ipex_inductor.errors import MissingPackageError


def roi_align(
    input: Tensor,
    rois: Tensor,
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:
    """Pool regions of activations to a fixed size.

    Args:
        input: [N, C, H, W].
        rois: [K, 5]; a region is the index of its image and its corners x1, y1, x2, y2.
        output_size: height and width of a pooled region.
        spatial_scale: factor from the corners to pixels of `input`.
        sampling_ratio: as in torchvision.
        aligned: as in torchvision.

    Returns:
        [K, C, *output_size].

    Raises:
        MissingPackageError: without torchvision.
    """
    window = (output_size, spatial_scale, sampling_ratio, aligned)
    pooled: Tensor = _torchvision().roi_align(input, rois, *window)
    return pooled


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the boxes that non-maximum suppression keeps, as int64 indices by falling score.

    Args:
        dets: boxes [K, 4] (x1, y1, x2, y2).
        scores: [K].
        iou_threshold: overlap above which the box of lower score is dropped.

    Raises:
        MissingPackageError: without torchvision.
    """
    indices: Tensor = _torchvision().nms(dets, scores, iou_threshold)
    return indices


class RoIAlign(nn.Module):
    """`roi_align` as a module with fixed parameters."""

    def __init__(
        self,
        output_size: int | tuple[int, int],
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool = False,
    ) -> None:
        super().__init__()
        self.window = (output_size, spatial_scale, sampling_ratio, aligned)

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        """Return `roi_align` of the input and the regions."""
        return roi_align(input, rois, *self.window)

    def extra_repr(self) -> str:
        """Return the parameters, as torchvision shows them."""
        names = ("output_size", "spatial_scale", "sampling_ratio", "aligned")
        return ", ".join(f"{n}={v}" for n, v in zip(names, self.window, strict=True))


def _torchvision() -> Any:
    if importlib.util.find_spec("torchvision") is None:
        advice = "Install the version that matches your torch: pip install torchvision."
        raise MissingPackageError("torchvision to be installed", "no such package", advice)
    return importlib.import_module("torchvision.ops")

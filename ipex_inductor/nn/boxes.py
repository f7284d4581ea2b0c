"""torchvision's operators on boxes, under the names IPEX gave them."""

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
    """Regions `rois` [K, 5] of `input` [N, C, H, W], pooled to [K, C, *output_size].

    A region is its image's number and its corners x1, y1, x2, y2 before `spatial_scale`. Raises
    `MissingPackageError` without torchvision.
    """
    window = (output_size, spatial_scale, sampling_ratio, aligned)
    pooled: Tensor = _torchvision().roi_align(input, rois, *window)
    return pooled


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Which boxes `dets` [K, 4] (x1, y1, x2, y2) stay, as int64 numbers by falling `scores` [K].

    Raises `MissingPackageError` without torchvision.
    """
    kept: Tensor = _torchvision().nms(dets, scores, iou_threshold)
    return kept


class RoIAlign(nn.Module):
    """`roi_align` with its window fixed."""

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
        """See `roi_align`."""
        return roi_align(input, rois, *self.window)

    def extra_repr(self) -> str:
        """The window, as torchvision shows it."""
        names = ("output_size", "spatial_scale", "sampling_ratio", "aligned")
        return ", ".join(f"{n}={v}" for n, v in zip(names, self.window, strict=True))


def _torchvision() -> Any:
    if importlib.util.find_spec("torchvision") is None:
        todo = "Install the version that goes with your torch: pip install torchvision."
        raise MissingPackageError("torchvision to be installed", "no such package", todo)
    return importlib.import_module("torchvision.ops")

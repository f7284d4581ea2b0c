"""`ipex.nn.functional`: the feature interaction of recommenders, and box operators."""

import torch
from torch import Tensor

from ipex_inductor.errors import ArgumentError
from ipex_inductor.nn.boxes import nms, roi_align

__all__ = ["interaction", "nms", "roi_align"]


def interaction(*tensors: Tensor) -> Tensor:
    """Return the first of N tensors [B, D] with the dot products of all pairs: [B, D + N(N-1)/2].

    The products are in the order (1, 0), (2, 0), (2, 1), (3, 0), ... of DLRM's dot interaction
    (arXiv 1906.00091). Dtypes are promoted.

    Raises:
        ArgumentError: unless all tensors have one shape [B, D].
    """
    _check_features(tensors)
    features = torch.stack(tensors, 1)
    products = features @ features.transpose(1, 2)
    count = len(tensors)
    row, column = torch.tril_indices(count, count, -1, device=features.device)
    return torch.cat([tensors[0], products[:, row, column]], 1)


def _check_features(tensors: tuple[Tensor, ...]) -> None:
    shapes = [t.shape for t in tensors]  # symbolic sizes have no hash
    if tensors and len(shapes[0]) == 2 and all(shape == shapes[0] for shape in shapes):
        return
    received = ", ".join(str(list(t.shape)) for t in tensors) or "none"
    advice = "Pass one feature a tensor, all of one width."
    raise ArgumentError("tensors of one shape [B, D]", received, advice)

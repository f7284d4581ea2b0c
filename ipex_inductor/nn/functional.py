"""`ipex.nn.functional`: the interaction of recommenders, and operators on boxes."""

import torch
from torch import Tensor

from ipex_inductor.errors import ArgumentError
from ipex_inductor.nn.boxes import nms, roi_align

__all__ = ["interaction", "nms", "roi_align"]


def interaction(*tensors: Tensor) -> Tensor:
    """The first of N tensors [B, D], then the dot products of every two: [B, D + N(N-1)/2].

    Products stand in the order (1, 0), (2, 0), (2, 1), (3, 0), ... of DLRM's dot interaction (arXiv
    1906.00091). Dtypes are promoted. Raises `ArgumentError` unless all have one shape [B, D].
    """
    _check_features(tensors)
    features = torch.stack(tensors, 1)
    products = features @ features.transpose(1, 2)
    count = len(tensors)
    row, column = torch.tril_indices(count, count, -1, device=features.device)
    return torch.cat([tensors[0], products[:, row, column]], 1)


def _check_features(tensors: tuple[Tensor, ...]) -> None:
    if len({t.shape for t in tensors}) == 1 and tensors[0].dim() == 2:
        return
    came = ", ".join(str(list(t.shape)) for t in tensors) or "none"
    todo = "Pass one feature a tensor, all of one width."
    raise ArgumentError("tensors of one shape [B, D]", came, todo)

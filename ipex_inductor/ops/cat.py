"""`ipex::cat`: tensors side by side, each written to its place once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ipex_inductor.ops.defining import op


@op("cat")
def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat` of parts of one dtype and rank. The reference."""
    return torch.cat(list(parts), dim)


cat.register_fake(lambda parts, dim: torch.cat(list(parts), dim))

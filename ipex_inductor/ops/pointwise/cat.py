"""`ipex::cat`: concatenation that writes each tensor to its slice once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import op


@op("cat")
def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return `torch.cat` of parts of one dtype and rank: the reference."""
    return torch.cat(list(parts), dim)


cat.register_fake(lambda parts, dim: torch.cat(list(parts), dim))

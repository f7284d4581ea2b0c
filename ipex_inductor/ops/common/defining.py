"""Registration of the `ipex::` ops with torch."""

from collections.abc import Callable

import torch
from torch._library.custom_ops import CustomOpDef


def op(name: str) -> Callable[[Callable[..., object]], CustomOpDef]:
    """Return a decorator that registers a function as op `ipex::<name>`, which mutates no argument.

    All ops are registered from this one file: torch looks up the source of the file that defines an
    op, which takes 4 ms for each new file, in all modules.
    """

    def define(function: Callable[..., object]) -> CustomOpDef:
        return torch.library.custom_op(f"ipex::{name}", function, mutates_args=())

    return define

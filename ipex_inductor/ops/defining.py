"""How an op of ours is made known to torch."""

from collections.abc import Callable

import torch
from torch._library.custom_ops import CustomOpDef


def op(name: str) -> Callable[[Callable[..., object]], CustomOpDef]:
    """A decorator: `function` is the op `ipex::<name>`, which writes to none of its arguments.

    From this one file: torch looks for the source of whoever defines an op, in all modules again
    for each new file, which takes 4 ms.
    """

    def define(function: Callable[..., object]) -> CustomOpDef:
        return torch.library.custom_op(f"ipex::{name}", function, mutates_args=())

    return define

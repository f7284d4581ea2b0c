"""Notice optimizer steps, by torch's hook for all optimizers.

Dynamo traces the hook in a step that it compiles, so it lies outside of `weight_access.py`, whose
functions are hidden from Dynamo: a hidden hook would break the step's graph in two.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def register(note: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call `note` with each optimizer that stepped in eager mode, from now on in this process.

    A compiled step counts versions, so Dynamo must find nothing in the hook.
    """

    def note_eager_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            note(optimizer)

    register_optimizer_step_post_hook(note_eager_step)

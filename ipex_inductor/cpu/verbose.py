"""Report of every primitive that oneDNN runs, for a few lines of a program."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from ipex_inductor.errors import OptionError

VERBOSE_OFF = 0
VERBOSE_ON = 1
VERBOSE_ON_CREATION = 2  # and when a primitive is made


def verbose(level: int) -> AbstractContextManager[object]:
    """Make oneDNN print a line for each primitive to standard output, inside a `with` block.

    Args:
        level: `VERBOSE_OFF`, `VERBOSE_ON` or `VERBOSE_ON_CREATION`; else `OptionError` is raised.
    """
    if level in (VERBOSE_OFF, VERBOSE_ON, VERBOSE_ON_CREATION):
        onednn: Any = torch.backends.mkldnn
        context: AbstractContextManager[object] = onednn.verbose(level)
        return context
    advice = "VERBOSE_ON shows what runs and how long it takes."
    raise OptionError("VERBOSE_OFF, VERBOSE_ON or VERBOSE_ON_CREATION", repr(level), advice)

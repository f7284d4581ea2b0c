"""oneDNN's own report of every primitive it runs, for a few lines of a program."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from ipex_inductor.errors import OptionError

VERBOSE_OFF = 0
VERBOSE_ON = 1
VERBOSE_ON_CREATION = 2  # and when a primitive is made


def verbose(level: int) -> AbstractContextManager[object]:
    """Inside a `with`, oneDNN prints a line for each primitive to standard output.

    `level`: `VERBOSE_OFF`, `VERBOSE_ON` or `VERBOSE_ON_CREATION`; `OptionError` for anything else.
    """
    if level in (VERBOSE_OFF, VERBOSE_ON, VERBOSE_ON_CREATION):
        onednn: Any = torch.backends.mkldnn
        made: AbstractContextManager[object] = onednn.verbose(level)
        return made
    todo = "VERBOSE_ON shows what runs and how long it takes."
    raise OptionError("VERBOSE_OFF, VERBOSE_ON or VERBOSE_ON_CREATION", repr(level), todo)

"""Switches of the whole process that users of IPEX know."""

import logging

from ipex_inductor import __version__, compat, config
from ipex_inductor.errors import ArgumentError

LOGS = ("ipex_inductor", "IPEX")  # what becomes of graphs, and of models in `optimize`


def enable_onednn_fusion(enabled: bool) -> None:
    """Switch the rules of backend `ipex` off (or on again) for graphs compiled afterwards.

    As `options={"rules": "-*"}` of every later compilation that names no rules of its own. What is
    compiled already stays so, and Dynamo hands it to other models of the same class:
    `torch.compiler.reset()` between the two has all compiled anew. No other backend is touched.
    Raises `ArgumentError` for anything but True or False.
    """
    if not isinstance(enabled, bool):
        todo = "False switches the rules off, True on."
        raise ArgumentError("True or False", repr(enabled), todo)
    config.enable_fusion(enabled)


def set_logging_level(level: int | str = logging.WARNING) -> None:
    """How much our logs say: `logging.INFO` a line a graph, `logging.DEBUG` every decision.

    They go to the handlers of the program, and to standard error where there are none.
    """
    for log in map(logging.getLogger, LOGS):
        log.setLevel(level)
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())


def version() -> None:
    """Print the versions of this package and of torch."""
    print(f"ipex_inductor version: {__version__}")
    print(f"torch version:         {compat.VERSION}")

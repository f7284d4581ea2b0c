"""Process-wide switches of IPEX."""

import logging

from ipex_inductor import __version__, compat, config
from ipex_inductor.errors import ArgumentError

LOGS = ("ipex_inductor", "IPEX")  # loggers of graph compilation and of `optimize`


def enable_onednn_fusion(enabled: bool) -> None:
    """Switch the rules of backend `ipex` off (or on again) for graphs compiled afterwards.

    It acts as `options={"rules": "-*"}` of every later compilation that sets no rules. Graphs
    compiled already stay so, and Dynamo may reuse them for other models of the class; call
    `torch.compiler.reset()` in between to recompile. No other backend is affected.

    Raises:
        ArgumentError: for anything but True or False.
    """
    if not isinstance(enabled, bool):
        advice = "False switches the rules off, True on."
        raise ArgumentError("True or False", repr(enabled), advice)
    config.enable_fusion(enabled)


def set_logging_level(level: int | str = logging.WARNING) -> None:
    """Set the log level: `logging.INFO` is a line per graph, `logging.DEBUG` every decision.

    Logs go to the program's handlers, or to standard error if there are none.
    """
    for log in map(logging.getLogger, LOGS):
        log.setLevel(level)
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())


def version() -> None:
    """Print the versions of this package and of torch."""
    print(f"ipex_inductor version: {__version__}")
    print(f"torch version:         {compat.VERSION}")

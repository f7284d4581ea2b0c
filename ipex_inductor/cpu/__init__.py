"""Names that users of IPEX know under `ipex.cpu`."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("launch", "runtime", "verbose"):
        return import_module(f"ipex_inductor.cpu.{name}")
    raise AttributeError(f"module 'ipex_inductor.cpu' has no attribute {name!r}")

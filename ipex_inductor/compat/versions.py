"""Versions of torch: the installed one, the supported ones, and the tested ones."""

import re

import torch

from ipex_inductor.errors import UnsupportedTorchError

VERSION = str(torch.__version__)
# The origin of Inductor's templates in recorded choices: another torch has other templates.
TEMPLATES = f"torch {VERSION.split('+')[0]}"
OLDEST = (2, 11)
TESTED = {
    (2, 11): "whole suite",
    (2, 12): "smoke test",
    (2, 13): "whole suite, in CI",
    (2, 14): "smoke test",
    (2, 15): "whole suite",
}


def torch_minor(version: str = VERSION) -> tuple[int, int]:
    """Return (major, minor) of a torch version such as "2.13.0+cpu" or "2.16.0.dev2026"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def untested_reason(version: str = VERSION) -> str | None:
    """Return why our passes must not run with this torch, or None if it is tested.

    Raises `UnsupportedTorchError` for a torch too old to fall back on.
    """
    minor = torch_minor(version)
    if minor in TESTED:
        return None
    if minor < OLDEST:
        raise UnsupportedTorchError(
            f"torch >= {OLDEST[0]}.{OLDEST[1]}",
            f"torch {version}",
            'Install a supported one: pip install "torch>=2.11,<2.16".',
        )
    newest = ".".join(map(str, max(TESTED)))
    return f"torch {version} is newer than the newest tested one, {newest}"

"""ViT-B/16, for `benchmarks/studies/prebuild_ci.py`."""

from typing import Any

from ipex_inductor.cli.demo.models import load


def make() -> tuple[Any, tuple[Any, ...]]:
    """One input, in bf16."""
    return load("vit", "bf16", 1, "cpu")

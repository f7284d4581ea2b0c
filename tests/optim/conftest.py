"""Fixtures of optimizer steps."""

from support.optim.fixtures import _on_device, _one_thread, launches, way  # noqa: F401

"""Fixtures of optimizer steps, as tests/optim has them."""

from support.optim.fixtures import _on_device, _one_thread, launches  # noqa: F401

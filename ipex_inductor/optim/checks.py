"""Checks of hyperparameters, in the words torch's optimizers use."""

from torch import Tensor


def not_negative(**values: float | Tensor) -> None:
    """Raise `ValueError` for a value below 0 (or NaN), naming it."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"Invalid {name} value: {value}")


def in_range(betas: tuple[float, float]) -> None:
    """Raise `ValueError` unless both are in [0, 1)."""
    for index, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")

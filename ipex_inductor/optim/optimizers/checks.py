"""Checks of hyperparameters, with the error messages of torch's optimizers."""

from torch import Tensor


def not_negative(**values: float | Tensor) -> None:
    """Raise `ValueError` that names the value, if one is below 0 or NaN."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"Invalid {name} value: {value}")


def in_range(betas: tuple[float, float]) -> None:
    """Raise `ValueError` unless both values are in [0, 1)."""
    for index, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")

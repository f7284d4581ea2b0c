"""Recipes of FP8 training: formats, and how scales follow the magnitudes of earlier passes."""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Literal, NamedTuple

import torch

from ipex_inductor.errors import OptionError
from ipex_inductor.ops.quant.fp8_states import Settings

FORWARD_LARGEST, GRADIENT_LARGEST = 448, 57344  # finite numbers of E4M3 and E5M2
ALGORITHMS = ("max", "most_recent")


class Range(NamedTuple):
    """Largest finite numbers of a format, for the forward pass and for gradients."""

    max_fwd: int
    max_bwd: int


class Format(Enum):
    """FP8 formats of the forward pass and of gradients.

    `E4M3` and `E5M2` use one format for both. `HYBRID` rounds activations and weights to E4M3,
    which has one more bit of precision, and gradients to E5M2, which has the wider range.
    """

    E4M3 = Range(FORWARD_LARGEST, FORWARD_LARGEST)
    E5M2 = Range(GRADIENT_LARGEST, GRADIENT_LARGEST)
    HYBRID = Range(FORWARD_LARGEST, GRADIENT_LARGEST)

    @property
    def forward_dtype(self) -> torch.dtype:
        """Return the dtype of activations and weights."""
        return _dtype_of(self.value.max_fwd)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Return the dtype of gradients."""
        return _dtype_of(self.value.max_bwd)


def _dtype_of(largest: int) -> torch.dtype:
    return torch.float8_e4m3fn if largest == FORWARD_LARGEST else torch.float8_e5m2


@dataclass(frozen=True)
class DelayedScaling:
    """A recipe in which each tensor is scaled by the magnitudes of earlier passes.

    Args:
        margin: scales are divided by 2 to this power.
        interval: scales are computed in one of as many updates; the history grows in each.
        fp8_format: formats of the forward pass and of gradients.
        amax_history_len: passes whose largest magnitudes are kept.
        amax_compute_algo: "max" of the history, or the "most_recent" entry of it.
        override_linear_precision: GEMMs (forward, gradient of the input, gradient of the weight)
            to be computed without FP8; each must be False.
        scaling_factor_compute_algo: must be None: scales are `largest / 2**margin / amax`.
        reduce_amax: use the largest magnitudes of all processes of the group.

    Raises:
        OptionError: for a value of the wrong type or range.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        """Check each field."""
        checks = {
            "margin": (_is_int(self.margin), "an int"),
            "interval": (_is_int(self.interval) and self.interval > 0, "an int above 0"),
            "fp8_format": (isinstance(self.fp8_format, Format), "a Format"),
            "amax_history_len": (
                _is_int(self.amax_history_len) and self.amax_history_len > 0,
                "an int above 0",
            ),
            "amax_compute_algo": (
                self.amax_compute_algo in ALGORITHMS,
                '"max" or "most_recent"; functions are not supported',
            ),
            "override_linear_precision": (
                self.override_linear_precision == (False, False, False),
                "(False, False, False): GEMMs in other precisions are not supported",
            ),
            "scaling_factor_compute_algo": (
                self.scaling_factor_compute_algo is None,
                "None: functions are not supported",
            ),
            "reduce_amax": (isinstance(self.reduce_amax, bool), "True or False"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise OptionError(
                    f"{name} to be {expected}",
                    repr(getattr(self, name)),
                    f"The fields of DelayedScaling are {', '.join(f.name for f in fields(self))}.",
                )

    def settings(self, group: str) -> Settings:
        """Return the arguments of an update, for maxima reduced over a named process group."""
        most_recent = self.amax_compute_algo == "most_recent"
        return Settings(self.margin, most_recent, self.interval, self.amax_history_len, group)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

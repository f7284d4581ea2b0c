"""Knobs of `optimize`: the defaults of each level, and the user's own settings."""

from collections.abc import Mapping
from dataclasses import dataclass

from ipex_inductor.errors import LevelError

LEVELS = {
    "O0": frozenset[str](),
    "O1": frozenset(
        {
            "conv_bn_folding",
            "linear_bn_folding",
            "weights_prepack",
            "replace_dropout_with_identity",
            "optimize_lstm",
            "split_master_weight_for_bf16",
            "fuse_update_step",
        }
    ),
}


# The knobs that take effect in one phase only.
PHASES = {
    "inference": (
        *("conv_bn_folding", "linear_bn_folding", "replace_dropout_with_identity"),
        "concat_linear",
    ),
    "training": ("split_master_weight_for_bf16", "fuse_update_step"),
}


@dataclass(frozen=True)
class Knobs:
    """Knobs in force for one call of `optimize`.

    `on`: what is to be done. `asked`: what the user set, with a warning if it is not done.
    """

    on: frozenset[str]
    asked: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name in self.on

    def out_of_phase(self, phase: str) -> dict[str, str]:
        """Return the knobs without effect in `phase`, with the phase where they have one."""
        phases = {name: active for active, names in PHASES.items() for name in names}
        return {n: active for n, active in phases.items() if active != phase and n in self.on}


def resolve(level: str, settings: Mapping[str, bool | None]) -> Knobs:
    """Return the knobs of `level`, overridden by the settings that are True or False.

    Raises `LevelError` for an unknown level.
    """
    if level not in LEVELS:
        raise LevelError(
            f"Unexpected optimization level {level}. Options are 'O0', 'O1'.",
            "one of them as `level`",
            repr(level),
            "O0 does only what other arguments ask for, O1 is the default.",
        )
    enabled = frozenset(name for name, value in settings.items() if value)
    refused = {name for name, value in settings.items() if value is not None and not value}
    return Knobs((LEVELS[level] - refused) | enabled, enabled)

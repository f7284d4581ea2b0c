"""The knobs of `optimize`: what a level switches on, and what the user switched himself."""

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


# What takes effect in one phase only.
PHASES = {
    "inference": (
        *("conv_bn_folding", "linear_bn_folding", "replace_dropout_with_identity"),
        "concat_linear",
    ),
    "training": ("split_master_weight_for_bf16", "fuse_update_step"),
}


@dataclass(frozen=True)
class Knobs:
    """`on`: what is to be done. `asked`: what the user set himself, who is warned if it is not."""

    on: frozenset[str]
    asked: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name in self.on

    def out_of_phase(self, phase: str) -> dict[str, str]:
        """Those that have no effect in `phase`, with the phase in which they have."""
        others = {name: other for other, names in PHASES.items() for name in names}
        return {n: other for n, other in others.items() if other != phase and n in self.on}


def resolve(level: str, given: Mapping[str, bool | None]) -> Knobs:
    """The knobs of `level`, but for those `given` as True or False.

    Raises `LevelError` for a level that there is not.
    """
    if level not in LEVELS:
        raise LevelError(
            f"Unexpected optimization level {level}. Options are 'O0', 'O1'.",
            "one of them as `level`",
            repr(level),
            "O0 does only what other arguments ask for, O1 is the default.",
        )
    asked = frozenset(name for name, value in given.items() if value)
    refused = {name for name, value in given.items() if value is not None and not value}
    return Knobs((LEVELS[level] - refused) | asked, asked)

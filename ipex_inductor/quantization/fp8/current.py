"""Settings of the `fp8_autocast` blocks that are open in each thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ipex_inductor.quantization.fp8.recipe import DelayedScaling


class Settings(NamedTuple):
    """Settings of the innermost block, and of the pass that the first active block began."""

    enabled: bool = False
    calibrating: bool = False
    recipe: DelayedScaling | None = None  # of the pass; None outside of any
    group: str = ""
    recording: bool = False  # the largest magnitudes count
    calibrated: bool = False  # a block of the pass was calibrating


class Current(threading.local):
    """Settings that prepared layers read: attributes, so that Dynamo guards on each alone."""

    def __init__(self) -> None:
        self.depth = 0  # blocks that are open
        self.outer: tuple[tuple[bool, bool], ...] = ()  # enabled and calibrating around each
        self.recomputing = False  # a checkpointed region runs again, for its backward
        self.traced = False  # torch.compile traces the outermost block
        self.traced_models: list[Any] = []  # called since a traced outermost block began
        self.restore(Settings())

    def settings(self) -> Settings:
        """Return the settings."""
        return Settings(
            self.enabled,
            self.calibrating,
            self.recipe,
            self.group,
            self.recording,
            self.calibrated,
        )

    def restore(self, settings: Settings) -> None:
        """Set all settings."""
        self.enabled, self.calibrating = settings.enabled, settings.calibrating
        self.recipe, self.group = settings.recipe, settings.group
        self.recording, self.calibrated = settings.recording, settings.calibrated


CURRENT = Current()


@contextmanager
def recomputing(settings: Settings) -> Iterator[None]:
    """Set the settings of an earlier pass for a block that records nothing."""
    outer, was_recomputing = CURRENT.settings(), CURRENT.recomputing
    CURRENT.restore(settings._replace(recording=False))
    CURRENT.recomputing = True
    CURRENT.depth += 1  # blocks inside are not outermost
    try:
        yield
    finally:
        CURRENT.depth -= 1
        CURRENT.recomputing = was_recomputing
        CURRENT.restore(outer)

"""Warnings of the kernel cache, each logged once per process."""

import functools
import logging

log = logging.getLogger("ipex_inductor")


@functools.lru_cache(maxsize=1024)
def say(text: str) -> None:
    """Log a warning, the first time that this text is given."""
    log.warning("kernel cache: %s", text)

"""What the cache has to say, each thing once a process."""

import functools
import logging

log = logging.getLogger("ipex_inductor")


@functools.lru_cache(maxsize=1024)
def say(text: str) -> None:
    """One line in the log, the first time."""
    log.warning("kernel cache: %s", text)

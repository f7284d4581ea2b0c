"""The default database that selection trusts while no other user can write to it."""

import functools
import logging
from pathlib import Path

from ipex_inductor.aot_cache.cache_root import RECORDS, home, state

log = logging.getLogger("ipex_inductor")


def default_folder() -> Path:
    """Return the folder that tuning writes and selection reads by default; it may not exist."""
    return home() / RECORDS


def is_default_trusted() -> bool:
    """Return True if no other user can write the default folder; log the reason once if not.

    The folder need not exist. A folder that the caller names is the caller's choice and not
    checked.
    """
    folder_state = state(default_folder())
    if not folder_state.private:
        _say(folder_state.reason)
    return folder_state.private


@functools.cache
def _say(reason: str) -> None:
    """Log the reason, once each."""
    log.warning("autotune records are not used: %s", reason)

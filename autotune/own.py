"""The database that selection trusts: in our own folder, while nobody else can write that."""

import functools
import logging
from pathlib import Path

from ipex_inductor.aot_cache.cache_root import RECORDS, home, state

log = logging.getLogger("ipex_inductor")


def default_folder() -> Path:
    """Where tuning writes and selection reads unless told otherwise; need not exist."""
    return home() / RECORDS


def trusted() -> bool:
    """Whether nobody else can write that folder, which need not be there yet; the log says so once.

    A folder that the caller names is the caller's choice, and not judged here.
    """
    found = state(default_folder())
    if not found.private:
        _say(found.reason)
    return found.private


@functools.cache
def _say(reason: str) -> None:
    log.warning("autotune records are not used: %s", reason)

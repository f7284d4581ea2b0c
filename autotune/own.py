"""The database that selection trusts: in our own folder, while nobody else can write that."""

import functools
import logging
from pathlib import Path

from ipex_inductor.aot_cache.home import RECORDS, home, state
from ipex_inductor.autotune.database import Records

log = logging.getLogger("ipex_inductor")


def default_folder() -> Path:
    """Where tuning writes and selection reads unless told otherwise; need not exist."""
    return home() / RECORDS


def open_own() -> Records:
    """The records of that folder; none if others could have written them, which the log says once.

    A folder that the caller names is the caller's choice, and not judged here.
    """
    folder = default_folder()
    return Records(folder) if folder.exists() and trusted() else Records()


def trusted() -> bool:
    """Whether nobody else can write that folder, which need not be there yet."""
    found = state(default_folder())
    if not found.private:
        _say(found.reason)
    return found.private


@functools.cache
def _say(reason: str) -> None:
    log.warning("autotune records are not used: %s", reason)

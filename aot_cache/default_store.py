"""Default stores of this process, in the cache folder, with the tiers the environment names."""

import functools
from pathlib import Path

from ipex_inductor.aot_cache import use
from ipex_inductor.aot_cache.cache_root import ensure, home
from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.aot_cache.store import Store, default_folder
from ipex_inductor.errors import OptionError

HEADERS = 1 << 30  # bytes of precompiled headers, 26 MB each


def store() -> Store | None:
    """Return the kernel cache in the cache folder; None, logged once, if that must not be used."""
    try:
        return _store_in(default_folder())
    except OptionError as error:
        say(str(error))
        return None


def headers() -> Store | None:
    """Return the store of precompiled headers, which only this machine's compiler can read.

    They are in no bundle and on no remote. None, logged once, if the cache folder must not be used.
    """
    try:
        return _headers_in(home() / "headers" / "1")
    except OptionError as error:
        say(str(error))
        return None


@functools.lru_cache(maxsize=8)
def _store_in(folder: Path) -> Store | None:
    if not _is_usable(folder):
        return None
    return Store(folder, use.layers(), use.remotes(), quota=use.quota())


@functools.lru_cache(maxsize=8)
def _headers_in(folder: Path) -> Store | None:
    return Store(folder, bundles=(), quota=HEADERS) if _is_usable(folder) else None


def _is_usable(folder: Path) -> bool:
    """Create the folder if needed and return whether it can be used; log why not."""
    folder_state = ensure(folder)
    if not folder_state.usable:
        say(f"{folder_state.reason}: what is compiled is not kept")
    return folder_state.usable

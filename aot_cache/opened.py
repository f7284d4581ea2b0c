"""The store of this process: in our home, with what the environment names beside it."""

import functools
from pathlib import Path

from ipex_inductor.aot_cache import use
from ipex_inductor.aot_cache.home import ensure
from ipex_inductor.aot_cache.notices import say
from ipex_inductor.aot_cache.store import Store, default_folder
from ipex_inductor.errors import OptionError


def store() -> Store | None:
    """The store in our home; None where that must not be used, which is said once."""
    try:
        return _store_in(default_folder())
    except OptionError as error:
        say(str(error))
        return None


@functools.lru_cache(maxsize=8)
def _store_in(folder: Path) -> Store | None:
    found = ensure(folder)
    if not found.usable:
        say(f"{found.reason}: what is compiled is not kept")
        return None
    return Store(folder, use.layers(), use.remotes(), quota=use.quota())

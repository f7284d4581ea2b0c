"""The kernel cache's entries of kernels of our own: the binary, and what made it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ipex_inductor.aot_cache import opened
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.key import Key, nearest
from ipex_inductor.aot_cache.store import Store

log = logging.getLogger("ipex_inductor")


def kernel(key: Key, build: Callable[[], tuple[dict[str, Any], bytes]] | None) -> Entry | None:
    """The kernel of that key, built by one process while the others wait for it.

    Without a `build` there is no compiler here: then a kernel by any will do, if all else is the
    same, and None says that there is none. Raises what `build` raises.
    """
    store = opened.store()
    if build is None:
        return _by_any_compiler(key, store) if store else None
    if store is None:
        return Entry(*build())

    def told() -> tuple[dict[str, Any], bytes]:
        if log.isEnabledFor(logging.INFO):
            log.info("kernel cache: %s is compiled: %s", key.kind, why_missed(key, store))
        return build()

    return store.compile_once(key, told)


def why_missed(key: Key, store: Store) -> str:
    """In the user's words: what sets this kernel's nearest entry apart from it."""
    found = nearest(key, store.keys())
    if found is None:
        return "there is none of its kind"
    return "; ".join(found[1]) or "its entry is not to be read"


def _by_any_compiler(key: Key, store: Store) -> Entry | None:
    if entry := store.get(key):
        return entry
    for found in store.keys():  # noqa: SIM118  # no dict
        if found.get("kind") != key.kind or not {"toolkit", "triton"} <= found.keys():
            continue
        other = replace(key, toolkit=found["toolkit"], triton=found["triton"])
        if other.fields == dict(found) and (entry := store.get(other)):
            return entry
    return None

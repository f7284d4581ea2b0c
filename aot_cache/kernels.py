"""The kernel cache's entries of kernels of our own: the binary, and what made it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from ipex_inductor.aot_cache import default_store
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.key import Key, nearest
from ipex_inductor.aot_cache.store import Store

log = logging.getLogger("ipex_inductor")

_looked_for: ContextVar[list[Key] | None] = ContextVar("looked_for", default=None)


@contextmanager
def looked_for() -> Iterator[list[Key]]:
    """The keys of all kernels that are asked for inside, in this thread."""
    keys: list[Key] = []
    token = _looked_for.set(keys)
    try:
        yield keys
    finally:
        _looked_for.reset(token)


def kernel(key: Key, build: Callable[[], tuple[dict[str, Any], bytes]]) -> Entry:
    """The kernel of that key, built by one process while the others wait for it.

    Raises what `build` raises.
    """
    _note(key)
    store = default_store.store()
    if store is None:
        return Entry(*build())

    def told() -> tuple[dict[str, Any], bytes]:
        if log.isEnabledFor(logging.INFO):
            log.info("kernel cache: %s is compiled: %s", key.kind, why_missed(key, store))
        return build()

    return store.compile_once(key, told)


def either(*keys: Key) -> Iterator[Entry]:
    """The kernels of those keys that are on this machine, in this order."""
    store = default_store.store()
    for key in keys:
        if store and store.holds(key) and (entry := store.get(key)):
            _note(key)
            yield entry


def by_any_compiler(key: Key) -> Iterator[Entry]:
    """For where there is none: the kernel of that key, then those by others, if all else is alike.

    The one that was asked for may not be the one that can be loaded here.
    """
    if (store := default_store.store()) is None:
        return
    if entry := store.get(key):
        _note(key)
        yield entry
    for found in list(store.keys()):
        if found.get("kind") != key.kind or not {"toolkit", "triton"} <= found.keys():
            continue
        other = replace(key, toolkit=found["toolkit"], triton=found["triton"])
        if other != key and other.fields == dict(found) and (entry := store.get(other)):
            _note(other)
            yield entry


def _note(key: Key) -> None:
    if (keys := _looked_for.get()) is not None:
        keys.append(key)


def why_missed(key: Key, store: Store) -> str:
    """In the user's words: what sets this kernel's nearest entry apart from it."""
    found = nearest(key, store.keys())
    if found is None:
        return "there is none of its kind"
    return "; ".join(found[1]) or "its entry is not to be read"

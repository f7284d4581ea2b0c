"""Kernel cache entries of this package's own kernels: the binary, and its provenance."""

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
def record_keys() -> Iterator[list[Key]]:
    """Collect the keys of all kernels requested inside the context, in this thread."""
    keys: list[Key] = []
    token = _looked_for.set(keys)
    try:
        yield keys
    finally:
        _looked_for.reset(token)


def kernel(key: Key, build: Callable[[], tuple[dict[str, Any], bytes]]) -> Entry:
    """Return the kernel of that key, built by one process while others wait for it.

    Raises what `build` raises.
    """
    _note(key)
    store = default_store.store()
    if store is None:
        return Entry(*build())

    def log_and_build() -> tuple[dict[str, Any], bytes]:
        if log.isEnabledFor(logging.INFO):
            log.info("kernel cache: %s is compiled: %s", key.kind, why_missed(key, store))
        return build()

    return store.compile_once(key, log_and_build)


def either(*keys: Key) -> Iterator[Entry]:
    """Yield the kernels of those keys that are on this machine, in this order."""
    store = default_store.store()
    for key in keys:
        if store and store.holds(key) and (entry := store.get(key)):
            _note(key)
            yield entry


def by_any_compiler(key: Key) -> Iterator[Entry]:
    """Yield the kernel of that key, then those that other compilers built, all else equal.

    For machines without a compiler: the kernel of the requested key may not be loadable there.
    """
    if (store := default_store.store()) is None:
        return
    if entry := store.get(key):
        _note(key)
        yield entry
    for fields in list(store.keys()):
        if fields.get("kind") != key.kind or not {"toolkit", "triton"} <= fields.keys():
            continue
        other_key = replace(key, toolkit=fields["toolkit"], triton=fields["triton"])
        if (
            other_key != key
            and other_key.fields == dict(fields)
            and (entry := store.get(other_key))
        ):
            _note(other_key)
            yield entry


def _note(key: Key) -> None:
    """Record a requested key for `record_keys`."""
    if (keys := _looked_for.get()) is not None:
        keys.append(key)


def why_missed(key: Key, store: Store) -> str:
    """Return how this kernel's nearest entry differs from it, for the user."""
    match = nearest(key, store.keys())
    if match is None:
        return "the cache has no entry of its kind"
    return "; ".join(match[1]) or "its entry cannot be read"

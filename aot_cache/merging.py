"""Entries from elsewhere into a store, each verified first."""

from collections.abc import Iterable
from dataclasses import dataclass

from ipex_inductor.aot_cache.bundle import Bundle
from ipex_inductor.aot_cache.folder import Folder, RefusedError
from ipex_inductor.aot_cache.store import Store


@dataclass(frozen=True)
class Merged:
    """How many entries were found, how many of them the store now has, and why not the others."""

    found: int
    held: int
    refused: tuple[str, ...]


def merge(store: Store, sources: Iterable[Folder | Bundle]) -> Merged:
    """Put every good entry of the sources into the store's folder; what that has already stays.

    Raises `RefusedError` and `OSError` for a folder that cannot be used; what is wrong with one
    entry only keeps that one out.
    """
    found, held, refused = 0, 0, []
    for source in sources:
        for file in source.files():
            found += 1
            try:
                held += store.adopt(file.name, source.load(file.name))
            except (OSError, RefusedError, ValueError) as error:
                refused.append(f"{file.name} in {source.label}: {error}")
    return Merged(found, held, tuple(refused))

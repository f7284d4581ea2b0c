"""Import of entries from folders and bundles into a store, each verified first."""

from collections.abc import Iterable
from dataclasses import dataclass

from ipex_inductor.aot_cache.bundle import Bundle
from ipex_inductor.aot_cache.folder import Folder, RefusedError
from ipex_inductor.aot_cache.store import Store


@dataclass(frozen=True)
class Merged:
    """Number of entries found, number that the store now has, and why others were refused."""

    found: int
    held: int
    refused: tuple[str, ...]


def merge(store: Store, sources: Iterable[Folder | Bundle]) -> Merged:
    """Import every valid entry of the sources into the store's folder; existing ones stay.

    Raises `RefusedError` and `OSError` for a folder that cannot be used; an error in one entry
    skips only that entry.
    """
    count, held, refused = 0, 0, []
    for source in sources:
        for file in source.files():
            count += 1
            try:
                held += store.adopt(file.name, source.load(file.name))
            except (OSError, RefusedError, ValueError) as error:
                refused.append(f"{file.name} in {source.label}: {error}")
    return Merged(count, held, tuple(refused))

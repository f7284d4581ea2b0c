"""Listing of all entries in a folder: nothing is run, and no use is counted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ipex_inductor.aot_cache import key as keys
from ipex_inductor.aot_cache.bundle import Bundle
from ipex_inductor.aot_cache.digest import digest_framed
from ipex_inductor.aot_cache.entry import CorruptError, key_and_meta, unpack_any
from ipex_inductor.aot_cache.folder import SUFFIX, File, Folder, RefusedError


@dataclass(frozen=True)
class Found:
    """A file with an entry's name, and the fields of its key; if bad, empty fields and `why`.

    `refused`: it is bad because of its owner, mode or kind. `meta`: the entry's metadata, as JSON.
    """

    file: File
    key: Mapping[str, Any]
    why: str = ""
    refused: bool = False
    meta: bytes = b""


def survey(folder: Folder | Bundle, whole: bool = False) -> Iterator[Found]:
    """Yield every entry, most recently used first; `whole` verifies all of it, not its key alone.

    Raises `RefusedError` for a folder that is not private, `OSError` for one that cannot be read; a
    missing folder is empty.
    """
    try:
        files = sorted(folder.files(), key=lambda file: -file.used)
    except FileNotFoundError:
        return
    for file in files:
        try:
            data = folder.load(file.name, head=not whole)
            key = (
                check_entry(file.name, data)
                if whole
                else _read_key(file.name, key_and_meta(data)[0])
            )
            yield Found(file, key, meta=key_and_meta(data)[1])
        except FileNotFoundError:  # evicted meanwhile
            continue
        except RefusedError as error:
            yield Found(file, {}, str(error), refused=True)
        except (OSError, ValueError) as error:
            yield Found(file, {}, str(error))


def check_entry(name: str, data: bytes) -> Mapping[str, Any]:
    """Return the key fields of a whole entry of that name; raise `ValueError` for any other."""
    return _read_key(name, unpack_any(data)[0])


def _read_key(name: str, framed: bytes) -> Mapping[str, Any]:
    """Return the fields of a framed key; raise `CorruptError` if the name is another key's."""
    fields = keys.read(framed)
    if digest_framed(framed) + SUFFIX != name:
        raise CorruptError("its name is that of another key")
    return fields

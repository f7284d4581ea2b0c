"""What lies in a folder of entries, for who looks at all of it: nothing here is run or counted."""

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
    """A file under the name of an entry, and the fields of its key; empty, with why, if it is bad.

    `refused`: it is bad because of whose or what it is. `meta` is what is kept with it, as JSON.
    """

    file: File
    key: Mapping[str, Any]
    why: str = ""
    refused: bool = False
    meta: bytes = b""


def survey(folder: Folder | Bundle, whole: bool = False) -> Iterator[Found]:
    """Every entry, the one used last first; `whole` verifies all of it, not its key alone.

    Raises `RefusedError` for a folder that is not ours, `OSError` for one that cannot be read; one
    that is not there is empty.
    """
    try:
        files = sorted(folder.files(), key=lambda file: -file.used)
    except FileNotFoundError:
        return
    for file in files:
        try:
            data = folder.load(file.name, head=not whole)
            key = checked(file.name, data) if whole else _named(file.name, key_and_meta(data)[0])
            yield Found(file, key, meta=key_and_meta(data)[1])
        except FileNotFoundError:  # evicted meanwhile
            continue
        except RefusedError as error:
            yield Found(file, {}, str(error), refused=True)
        except (OSError, ValueError) as error:
            yield Found(file, {}, str(error))


def checked(name: str, data: bytes) -> Mapping[str, Any]:
    """The fields of the key of a whole entry under that name; raises `ValueError` for any other."""
    return _named(name, unpack_any(data)[0])


def _named(name: str, framed: bytes) -> Mapping[str, Any]:
    found = keys.read(framed)
    if digest_framed(framed) + SUFFIX != name:
        raise CorruptError("its name is that of another key")
    return found

"""What lies in a folder of entries, for who looks at all of it: nothing here is run or counted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ipex_inductor.aot_cache import key as keys
from ipex_inductor.aot_cache.digest import digest_framed
from ipex_inductor.aot_cache.entry import HEAD, CorruptError, unpack_any
from ipex_inductor.aot_cache.folder import SUFFIX, File, Folder, RefusedError


@dataclass(frozen=True)
class Found:
    """A file under the name of an entry, and the fields of its key; empty, with why, if it is bad.

    `refused`: it is bad because of whose or what it is.
    """

    file: File
    key: Mapping[str, Any]
    why: str = ""
    refused: bool = False


def survey(folder: Folder, whole: bool = False) -> Iterator[Found]:
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
            yield Found(file, _key(folder, file.name, whole))
        except FileNotFoundError:  # evicted meanwhile
            continue
        except RefusedError as error:
            yield Found(file, {}, str(error), refused=True)
        except (OSError, ValueError) as error:
            yield Found(file, {}, str(error))


def _key(folder: Folder, name: str, whole: bool) -> Mapping[str, Any]:
    data = folder.load(name, head=not whole)
    framed = unpack_any(data)[0] if whole else data[HEAD:]
    found = keys.read(framed)
    if digest_framed(framed) + SUFFIX != name:
        raise CorruptError("its name is that of another key")
    return found

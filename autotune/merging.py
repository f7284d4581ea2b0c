"""Many files made one, line by line: what another version of ours wrote is carried unread.

Nothing is removed before what it held is on the disk elsewhere, nor what a writer still has open.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ipex_inductor.autotune.database import (
    SUFFIX,
    Refusal,
    name_of,
    opened,
    whole,
    write_lines,
)


@dataclass(frozen=True)
class Merged:
    """The file, how many records it holds, the lines left out, and the files removed since."""

    path: Path | None
    records: int
    refused: tuple[Refusal, ...]
    removed: tuple[Path, ...] = ()


def merge(path: Path, sources: Iterable[Path]) -> Merged:
    """Write `path`: every whole line of these files and folders once, ordered by digest.

    The same lines give the same bytes, whatever files they come in.
    """
    lines: dict[bytes, bytes] = {}
    refused = [refusal for file in opened(sources) for refusal in _read(file, lines)]
    write_lines(path, (lines[name] for name in sorted(lines)))
    return Merged(path, len(lines), tuple(refused))


def compact(folder: Path) -> Merged:
    """Make one file of all in `folder` that nobody writes to, and remove those.

    The new file is named by its content, so it takes no other's place. A file with a line that was
    refused stays, but for a last line that a killed writer left unfinished.
    """
    lines: dict[bytes, bytes] = {}
    refused: list[Refusal] = []
    with ExitStack() as held:
        spent: dict[Path, BinaryIO] = {}
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            file = _locked(path, held)
            if file is not None:
                bad = list(_read(file, lines))
                refused += bad
                if not any(refusal.ended for refusal in bad):
                    spent[path] = file
        content = b"".join(lines[name] for name in sorted(lines))
        target = folder / name_of("merged", content)
        spent.pop(target, None)
        if not spent:
            return Merged(None, len(lines), tuple(refused))
        write_lines(target, [content])
        removed = tuple(path for path, file in spent.items() if _as_read(path, file))
        for path in removed:
            path.unlink()
    return Merged(target, len(lines), tuple(refused), removed)


def _locked(path: Path, held: ExitStack) -> BinaryIO | None:
    """The file, locked until `held` ends; None if its writer lives or somebody else compacts it."""
    with suppress(OSError):
        # To write, or locks fail on network disks.
        file = held.enter_context(path.open("r+b"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    return None


def _as_read(path: Path, file: BinaryIO) -> bool:
    """Whether what has this name still is the file that was read, and no longer than then."""
    with suppress(FileNotFoundError):
        found = os.stat(path)
        return os.path.samestat(found, os.fstat(file.fileno())) and found.st_size == file.tell()
    return False


def _read(file: BinaryIO, lines: dict[bytes, bytes]) -> Iterator[Refusal]:
    """Add the whole lines of `file`; what is not whole comes back."""
    for number, line in enumerate(file, 1):
        try:
            lines.setdefault(whole(line)[0], line)
        except ValueError as error:
            yield Refusal(Path(file.name), number, str(error), line.endswith(b"\n"))

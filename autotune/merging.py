"""Merging of record files into one, line by line; lines of other package versions stay unparsed.

A file is removed only when its content is on the disk elsewhere and no writer has it open.
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
    open_files,
    split_line,
    write_lines,
)


@dataclass(frozen=True)
class Merged:
    """The file, its number of records, the refused lines, and the files removed."""

    path: Path | None
    records: int
    refused: tuple[Refusal, ...]
    removed: tuple[Path, ...] = ()


def merge(path: Path, sources: Iterable[Path]) -> Merged:
    """Write `path`: every valid line of these files and folders once, ordered by digest.

    Equal sets of lines give equal bytes, whatever files they come from.
    """
    lines: dict[bytes, bytes] = {}
    refused = [refusal for file in open_files(sources) for refusal in _read(file, lines)]
    write_lines(path, (lines[name] for name in sorted(lines)))
    return Merged(path, len(lines), tuple(refused))


def compact(folder: Path) -> Merged:
    """Merge all files in `folder` that no writer has open into one, and remove them.

    The new file is named by its content, so it replaces no other. A file with a refused line stays,
    unless that is a last line that a killed writer left unfinished.
    """
    lines: dict[bytes, bytes] = {}
    refused: list[Refusal] = []
    with ExitStack() as locks:
        merged_files: dict[Path, BinaryIO] = {}
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            file = _open_locked(path, locks)
            if file is not None:
                file_refusals = list(_read(file, lines))
                refused += file_refusals
                if not any(refusal.ended for refusal in file_refusals):
                    merged_files[path] = file
        content = b"".join(lines[name] for name in sorted(lines))
        target = folder / name_of("merged", content)
        merged_files.pop(target, None)
        if not merged_files:
            return Merged(None, len(lines), tuple(refused))
        write_lines(target, [content])
        removed = tuple(path for path, file in merged_files.items() if _as_read(path, file))
        for path in removed:
            path.unlink()
    return Merged(target, len(lines), tuple(refused), removed)


def _open_locked(path: Path, locks: ExitStack) -> BinaryIO | None:
    """Return the file, locked until `locks` ends; None if a writer or another merge has it."""
    with suppress(OSError):
        # Opened for writing, because locks fail on network disks otherwise.
        file = locks.enter_context(path.open("r+b"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    return None


def _as_read(path: Path, file: BinaryIO) -> bool:
    """Return True if this path still is the file that was read, and no longer than then."""
    with suppress(FileNotFoundError):
        stat = os.stat(path)
        return os.path.samestat(stat, os.fstat(file.fileno())) and stat.st_size == file.tell()
    return False


def _read(file: BinaryIO, lines: dict[bytes, bytes]) -> Iterator[Refusal]:
    """Add the valid lines of `file` to `lines` by digest, and yield the refused ones."""
    for number, line in enumerate(file, 1):
        try:
            lines.setdefault(split_line(line)[0], line)
        except ValueError as error:
            yield Refusal(Path(file.name), number, str(error), line.endswith(b"\n"))

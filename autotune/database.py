"""Records on disk: JSON lines with a digest each, one file a writer, merged as they are read.

Writers share no file, so writing needs no locks. A record is acknowledged once it is on the disk.
Readers take lines that are complete, unchanged and valid, and report the refused ones: a line cut
off by a crash, a changed byte, or a choice that does not exist.
"""

import fcntl
import hashlib
import os
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ipex_inductor.aot_cache.folder import sync_folder
from ipex_inductor.autotune import batches
from ipex_inductor.autotune import record as records
from ipex_inductor.autotune.record import Problem, Record
from ipex_inductor.autotune.space import why_refused

SUFFIX = ".jsonl"
_HEAD, _MIDDLE, _TAIL = b'{"record":', b',"sha256":"', b'"}\n'
_PROBLEM, _OUTCOMES = b'{"problem":', b',"outcomes":['
_TRIES = 3  # files of one writer that may be removed in succession before it gives up
_SYMBOLS = b',"symbols":['  # present in a dynamic-size problem
_BATCHED = tuple(f'"op":"{op}"'.encode() for op in batches.FARTHEST)
_DIGEST = 64  # hexadecimal digits of SHA-256


@dataclass(frozen=True)
class Refusal:
    """A line that was not used: its place, the reason, and whether it ends with a newline."""

    path: Path
    line: int
    reason: str
    ended: bool = True

    def __str__(self) -> str:
        """Return `file:line: reason`, as compilers write it."""
        return f"{self.path}:{self.line}: {self.reason}"


class Records:
    """The records of files and folders, each once; every loop reads them again.

    `refused` lists the lines that the last loop refused. With `known`, a line with an unregistered
    choice is refused too: readers that run choices need that, readers that only display records do
    not. With `only`, lines of other problems (in canonical form) are skipped without parsing.
    Raises `FileNotFoundError` for a missing source.
    """

    def __init__(
        self, *sources: Path, known: bool = True, only: Collection[bytes] | None = None
    ) -> None:
        self.sources = sources
        self.known = known
        self._only = None if only is None else frozenset(only)
        self.refused: list[Refusal] = []

    def __iter__(self) -> Iterator[Record]:
        """Yield the records one by one, so that the reader need not hold them all."""
        self.refused, digests = [], set()
        for file in open_files(self.sources):
            for number, line in self._lines(file):
                try:
                    sha256, record = self._parse(line)
                except (ValueError, msgspec.MsgspecError) as error:
                    self.refused.append(Refusal(Path(file.name), number, str(error)))
                else:
                    if sha256 not in digests:
                        digests.add(sha256)
                        yield record

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield the number and text of the lines of a file that may be wanted."""
        if self._only is None:
            yield from enumerate(file, 1)
            return
        positions = index_of(file).places
        selected = (position for key in self._only for position in positions.get(hash(key), ()))
        for start, number in sorted(selected):
            file.seek(start)
            line = file.readline()
            if _problem(line) in self._only:
                yield number, line

    def _parse(self, line: bytes) -> tuple[bytes, Record]:
        """Return the digest and the record of a line; raise `ValueError` if it is refused."""
        name, body = split_line(line)
        record = records.decode(body)
        reason = why_refused(record, self.known)
        if reason is not None:
            raise ValueError(reason)
        return name, record


class Shard:
    """The file that one writer appends to, created with the first record and locked while open.

    The lock protects it from removal (`merging.compact`), not from other writers. A forked child
    must open its own shard: two writers of one file could tear each other's lines.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def append(self, record: Record) -> str:
        """Write one record and return its digest once it is on the disk.

        Raises `ValueError` for a record that readers would refuse, and `OSError` if the disk does
        not take it; then nothing of it remains.
        """
        reason = why_refused(record)
        if reason is not None:
            raise ValueError(reason)
        name, line = _line(record)
        for _ in range(_TRIES):
            if self._wrote(line):
                return name
            self.close()
        raise OSError(f"somebody removes the files of {self._folder} as they are written")

    def close(self) -> None:
        """Close the file; the next record starts another."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _wrote(self, line: bytes) -> bool:
        """Write and sync a line; return False if the file has been removed.

        That can happen before it is locked, or by a process that ignores locks.
        """
        if self._file is None:
            self._file = self._open()
        end = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(f"the disk took a part of a record for {self._folder}")
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, end)
            raise
        return os.fstat(self._file).st_nlink > 0

    def _open(self) -> int:
        """Create and lock a new file in the folder, and return its descriptor."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):  # file systems without locks, where `compact` cannot run
            fcntl.flock(file, fcntl.LOCK_EX)
        sync_folder(self._folder)
        return file


def write(path: Path, given: Iterable[Record]) -> None:
    """Replace `path` atomically by these records, each once, ordered by digest."""
    lines = dict(map(_line, given))
    write_lines(path, (lines[name] for name in sorted(lines)))


def add(folder: Path, given: Iterable[Record]) -> Path:
    """Add a file of these records to `folder`, named by its content, and return its path."""
    lines = dict(map(_line, given))
    content = b"".join(lines[name] for name in sorted(lines))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / name_of("imported", content)
    write_lines(path, [content])
    return path


def name_of(kind: str, content: bytes) -> str:
    """Return a file name of this kind that is unique to its content."""
    return f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}{SUFFIX}"


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Replace `path` atomically; it is on the disk when this returns."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(part, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def digest(record: Record) -> str:
    """Return the SHA-256 of the record's canonical form."""
    return _line(record)[0]


def open_files(sources: Iterable[Path]) -> Iterator[BinaryIO]:
    """Yield every file of these files and folders once, open for reading until the next one.

    A file that disappears while its folder is read was merged into another one, so the folder is
    listed again until it shows no new file.
    """
    done: set[Path] = set()
    for source in sources:
        may_go = (FileNotFoundError,) if source.is_dir() else ()
        while new_files := sorted(set(_record_files(source)) - done):
            done.update(new_files)
            for path in new_files:
                with suppress(*may_go), open(path, "rb") as file:
                    yield file


@dataclass(frozen=True)
class Index:
    """The line positions of each problem in a file; dynamic-size problems; families of problems.

    `places` is keyed by hash to be small, so readers must check the line itself.
    """

    places: dict[int, list[tuple[int, int]]]  # start and number of a line
    varying: dict[bytes, Problem]
    batches: dict[bytes, list[tuple[int, bytes]]]  # by family, with canonical forms


_indices: dict[str, tuple[tuple[int, ...], Index]] = {}  # by file name, with the stamp of the file


def index_of(file: BinaryIO) -> Index:
    """Return the index of an open file; cached until the file changes."""
    stat = os.fstat(file.fileno())
    stamp = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    entry = _indices.get(str(file.name))
    if entry is None or entry[0] != stamp:
        entry = _indices[str(file.name)] = stamp, _build_index(file)
    return entry[1]


def varying(source: Path) -> dict[bytes, Problem]:
    """Return all dynamic-size problems of a file or folder by canonical form, unvalidated."""
    return {key: p for file in open_files([source]) for key, p in index_of(file).varying.items()}


def problems_by_family(source: Path) -> dict[bytes, list[tuple[int, bytes]]]:
    """Return the problems of a file or folder by family (see `batches.family`)."""
    families: dict[bytes, list[tuple[int, bytes]]] = {}
    for file in open_files([source]):
        for kind, problems in index_of(file).batches.items():
            families.setdefault(kind, []).extend(problems)
    return families


def _build_index(file: BinaryIO) -> Index:
    """Return the index of an open file, built by one pass over its lines."""
    positions: dict[int, list[tuple[int, int]]] = {}
    dynamic: dict[bytes, Problem] = {}
    families: dict[bytes, list[tuple[int, bytes]]] = {}
    start = 0
    for number, line in enumerate(file, 1):
        key = _problem(line)
        is_new = bool(key) and hash(key) not in positions
        if key:
            positions.setdefault(hash(key), []).append((start, number))
        if is_new and (_SYMBOLS in key or any(op in key for op in _BATCHED)):
            with suppress(msgspec.MsgspecError):
                problem = records.decode_problem(key)
                if problem.symbols:
                    dynamic[key] = problem
                elif kind := batches.family(problem):
                    families.setdefault(kind[0], []).append((kind[1], key))
        start += len(line)
    return Index(positions, dynamic, families)


def _record_files(source: Path) -> Iterable[Path]:
    """Return the record files of a folder, or the file itself."""
    return source.glob(f"*{SUFFIX}") if source.is_dir() else [source]


def _problem(line: bytes) -> bytes:
    """Return the bytes in the place of a line's problem, the first field of a record."""
    end = line.find(_OUTCOMES)
    return line[len(_HEAD) + len(_PROBLEM) : end] if line.startswith(_HEAD + _PROBLEM) else b""


def split_line(line: bytes) -> tuple[bytes, bytes]:
    """Return the digest and the JSON of a line as `write` makes it; raise `ValueError` for others.

    The digest covers the bytes as they are, so no change of a line goes unnoticed.
    """
    end = len(line) - len(_TAIL) - _DIGEST
    start = end - len(_MIDDLE)
    framed = line.startswith(_HEAD) and line.endswith(_TAIL) and line[start:end] == _MIDDLE
    if not framed or start < len(_HEAD):
        raise ValueError("not a whole record: cut off, or no line of ours")
    body, stated = line[len(_HEAD) : start], line[end : end + _DIGEST]
    if hashlib.sha256(body).hexdigest().encode() != stated:
        raise ValueError("changed after it was written: the digest is another")
    return stated, body


def _line(record: Record) -> tuple[str, bytes]:
    """Return the digest and the line of a record."""
    body = records.encode(record)
    name = hashlib.sha256(body).hexdigest()
    return name, _HEAD + body + _MIDDLE + name.encode() + _TAIL

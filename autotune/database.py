"""Records on disk: JSON lines with a digest each, one file a writer, merged as they are read.

Writers share no file, so there are no locks; a record is acknowledged once it is on the disk.
Readers take what is whole, known and possible, and say what they refused: a line cut off by a
crash, a changed byte, a choice that there is not.
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
_TRIES = 3  # files of one writer that somebody else may remove, one after the other
_SYMBOLS = b',"symbols":['  # in a problem that has any
_BATCHED = tuple(f'"op":"{op}"'.encode() for op in batches.FARTHEST)
_DIGEST = 64  # hexadecimal digits of SHA-256


@dataclass(frozen=True)
class Refusal:
    """A line that was not used: where it stands, why, and whether it ends as lines do."""

    path: Path
    line: int
    reason: str
    ended: bool = True

    def __str__(self) -> str:
        """`file:line: reason`, as compilers write it."""
        return f"{self.path}:{self.line}: {self.reason}"


class Records:
    """The records of these files and folders, each once, read anew by every loop over them.

    `refused` tells what the last loop did not take. With `known` that is also what names a choice
    that is not registered here: who only looks may want it, who runs choices must not. With `only`,
    lines of other problems (in canonical form) are passed over unread. Raises `FileNotFoundError`
    for a source that is not there.
    """

    def __init__(
        self, *sources: Path, known: bool = True, only: Collection[bytes] | None = None
    ) -> None:
        self.sources = sources
        self.known = known
        self._only = None if only is None else frozenset(only)
        self.refused: list[Refusal] = []

    def __iter__(self) -> Iterator[Record]:
        """One by one, so that no more of them need be held than their reader wants."""
        self.refused, met = [], set()
        for file in opened(self.sources):
            for number, line in self._lines(file):
                try:
                    name, record = self._parsed(line)
                except (ValueError, msgspec.MsgspecError) as error:
                    self.refused.append(Refusal(Path(file.name), number, str(error)))
                else:
                    if name not in met:
                        met.add(name)
                        yield record

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        if self._only is None:
            yield from enumerate(file, 1)
            return
        places = index_of(file).places
        wanted = (place for key in self._only for place in places.get(hash(key), ()))
        for start, number in sorted(wanted):
            file.seek(start)
            line = file.readline()
            if _problem(line) in self._only:
                yield number, line

    def _parsed(self, line: bytes) -> tuple[bytes, Record]:
        name, body = whole(line)
        record = records.decode(body)
        reason = why_refused(record, self.known)
        if reason is not None:
            raise ValueError(reason)
        return name, record


class Shard:
    """The file that one writer appends to, made with the first record and locked for as long.

    The lock is for who would remove it (`merging.compact`), not against other writers: a forked
    child must open its own, as two writers of one file could tear each other's lines.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def append(self, record: Record) -> str:
        """Write one record; it is on the disk when its digest comes back.

        Raises `ValueError` for a record that no reader would take, and `OSError` if the disk does
        not take it: then nothing of it stays.
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
        """End the shard; the next record starts another."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _wrote(self, line: bytes) -> bool:
        """False if the file was removed, before it was locked or by somebody who asks no locks."""
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
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):  # a file system without locks, on which nobody can compact
            fcntl.flock(file, fcntl.LOCK_EX)
        sync_folder(self._folder)
        return file


def write(path: Path, given: Iterable[Record]) -> None:
    """One file with these records, each once, ordered by digest; it replaces `path` whole."""
    lines = dict(map(_line, given))
    write_lines(path, (lines[name] for name in sorted(lines)))


def add(folder: Path, given: Iterable[Record]) -> Path:
    """One more file in `folder`, which is made if need be; named by what it holds."""
    lines = dict(map(_line, given))
    content = b"".join(lines[name] for name in sorted(lines))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / name_of("imported", content)
    write_lines(path, [content])
    return path


def name_of(kind: str, content: bytes) -> str:
    """Of a file that takes no other's place."""
    return f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}{SUFFIX}"


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Replace `path` whole or not at all; it is on the disk when this returns."""
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
    """The SHA-256 of its canonical form."""
    return _line(record)[0]


def opened(sources: Iterable[Path]) -> Iterator[BinaryIO]:
    """Every file of these files and folders, each once, open to read until the next is asked for.

    A file that goes while its folder is read was merged into another, so the folder is listed
    again until it shows nothing new.
    """
    done: set[Path] = set()
    for source in sources:
        may_go = (FileNotFoundError,) if source.is_dir() else ()
        while todo := sorted(set(_listed(source)) - done):
            done.update(todo)
            for path in todo:
                with suppress(*may_go), open(path, "rb") as file:
                    yield file


@dataclass(frozen=True)
class Index:
    """Where in a file the lines of each problem stand; problems of many sizes, and of one batch.

    By hash, so that it is small: whoever goes there reads what stands there.
    """

    places: dict[int, list[tuple[int, int]]]  # start and number of a line
    varying: dict[bytes, Problem]
    batches: dict[bytes, list[tuple[int, bytes]]]  # by family, with canonical forms


_indices: dict[str, tuple[tuple[int, ...], Index]] = {}  # of files as they were


def index_of(file: BinaryIO) -> Index:
    """Of an open file, which is read once for as long as it does not change."""
    now = os.fstat(file.fileno())
    stamp = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
    known = _indices.get(str(file.name))
    if known is None or known[0] != stamp:
        known = _indices[str(file.name)] = stamp, _indexed(file)
    return known[1]


def varying(source: Path) -> dict[bytes, Problem]:
    """All problems in a file or folder whose sizes vary, by canonical form: nothing is checked."""
    return {key: p for file in opened([source]) for key, p in index_of(file).varying.items()}


def batched(source: Path) -> dict[bytes, list[tuple[int, bytes]]]:
    """The problems in a file or folder whose like may be of another size, by `batches.family`."""
    found: dict[bytes, list[tuple[int, bytes]]] = {}
    for file in opened([source]):
        for kind, problems in index_of(file).batches.items():
            found.setdefault(kind, []).extend(problems)
    return found


def _indexed(file: BinaryIO) -> Index:
    places: dict[int, list[tuple[int, int]]] = {}
    found: dict[bytes, Problem] = {}
    alike: dict[bytes, list[tuple[int, bytes]]] = {}
    start = 0
    for number, line in enumerate(file, 1):
        key = _problem(line)
        is_new = bool(key) and hash(key) not in places
        if key:
            places.setdefault(hash(key), []).append((start, number))
        if is_new and (_SYMBOLS in key or any(op in key for op in _BATCHED)):
            with suppress(msgspec.MsgspecError):
                problem = records.decode_problem(key)
                if problem.symbols:
                    found[key] = problem
                elif kind := batches.family(problem):
                    alike.setdefault(kind[0], []).append((kind[1], key))
        start += len(line)
    return Index(places, found, alike)


def _listed(source: Path) -> Iterable[Path]:
    return source.glob(f"*{SUFFIX}") if source.is_dir() else [source]


def _problem(line: bytes) -> bytes:
    """What stands in the place of the problem, which is the first field of a record."""
    end = line.find(_OUTCOMES)
    return line[len(_HEAD) + len(_PROBLEM) : end] if line.startswith(_HEAD + _PROBLEM) else b""


def whole(line: bytes) -> tuple[bytes, bytes]:
    """The digest and the JSON of a line as `write` makes them; raises `ValueError` for any other.

    The digest is of the bytes as they stand: no byte of a line can change unseen.
    """
    end = len(line) - len(_TAIL) - _DIGEST
    start = end - len(_MIDDLE)
    framed = line.startswith(_HEAD) and line.endswith(_TAIL) and line[start:end] == _MIDDLE
    if not framed or start < len(_HEAD):
        raise ValueError("not a whole record: cut off, or no line of ours")
    body, said = line[len(_HEAD) : start], line[end : end + _DIGEST]
    if hashlib.sha256(body).hexdigest().encode() != said:
        raise ValueError("changed after it was written: the digest is another")
    return said, body


def _line(record: Record) -> tuple[str, bytes]:
    body = records.encode(record)
    name = hashlib.sha256(body).hexdigest()
    return name, _HEAD + body + _MIDDLE + name.encode() + _TAIL

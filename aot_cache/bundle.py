"""A bundle that was verified whole, and serves its entries as a layer that is only read.

Who signed it is what counts: with a good signature of a trusted key it does not matter whose the
file is or who can write it, because every entry is held against the signed manifest again when it
is read, from the descriptor that was verified. One that nobody we trust has signed is used only if
the caller allows it, and then the file and its folder are judged as those of layers are.
"""

import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ipex_inductor.aot_cache import disk, entry, trust
from ipex_inductor.aot_cache.cache_root import state
from ipex_inductor.aot_cache.entry import CorruptError
from ipex_inductor.aot_cache.folder import GUARDED, SUFFIX, File, why_refused
from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.aot_cache.manifest import (
    HEAD,
    Head,
    Item,
    Manifest,
    checksum,
    read_head,
    read_manifest,
)
from ipex_inductor.aot_cache.signing import is_signed
from ipex_inductor.errors import BundleError, OlderBundleError, UntrustedError

_CHUNK = 1 << 20  # bytes hashed at a time

_T = TypeVar("_T")


@dataclass(frozen=True)
class Signer:
    """Who signed a bundle: the name of the key here, "" if it is not trusted."""

    public: bytes
    name: str = ""

    @property
    def trusted(self) -> bool:
        """Whether the key is one of those trusted here."""
        return bool(self.name)

    def __str__(self) -> str:
        return f"{self.name or 'a key that is not trusted'} ({self.public.hex()})"


class Bundle:
    """The entries of a verified bundle; made by `open_bundle`. Forked children may use it too."""

    def __init__(self, path: Path, file: int, manifest: Manifest, signer: Signer | None) -> None:
        self.path, self.manifest, self.signer = path, manifest, signer
        self.label = f"bundle {path}"
        by = f"signed by {signer}" if signer else "unsigned"
        about = f"{manifest.name!r}, serial {manifest.serial}, {by}"
        self.origin = f"the {self.label} ({about})"
        self._file = file
        self._where: dict[str, tuple[int, Item]] = {}
        at = HEAD
        for item in manifest.entries:
            self._where[item.key + SUFFIX] = at, item
            at += item.size
        weakref.finalize(self, disk.close, file)

    def read(self, name: str) -> bytes | None:
        """The bytes under a name; None if there are none to be had."""
        try:
            return self.load(name)
        except FileNotFoundError:
            return None
        except (OSError, CorruptError) as error:
            say(f"{name} in {self.label} is not used: {error}")
            return None

    def load(self, name: str, head: bool = False) -> bytes:
        """The bytes of an entry, or its key and metadata, which are not verified.

        Raises `FileNotFoundError`, `OSError`, and `CorruptError` if the file was changed meanwhile.
        """
        if name not in self._where:
            raise FileNotFoundError(name)
        at, item = self._where[name]
        if head:
            size = min(item.size, entry.HEAD + entry.KEY_LIMIT)
            first = _read(self._file, at, size)
            return first[: entry.head_end(first, item.size)]
        data = _read(self._file, at, item.size)
        if hashlib.sha256(data).hexdigest() != item.sha256:
            raise CorruptError("the bundle changed after it was opened")
        return data

    def files(self) -> Iterator[File]:
        """The entries, as files of a folder; none was used before the bundle was made."""
        for name, (_, item) in self._where.items():
            yield File(name, item.size, float(self.manifest.serial))


def open_bundle(
    path: Path, allow_unsigned: bool = False, allow_older: bool = False, accepts: bool = True
) -> Bundle:
    """Verify all of a bundle: signature, manifest, then every byte; no entry is read before.

    `allow_unsigned`: also without a signature, or with that of a key that is not trusted, from a
    place that only you (or root) can write. `allow_older`: also if a newer one was accepted before.
    `accepts`: from now on older ones are not; False for who only looks.
    Raises `BundleError`, of which `UntrustedError` and `OlderBundleError` are kinds.
    """
    path = path.absolute()
    file = _opened(path)
    try:
        bundle = _verified(path, file, allow_unsigned, allow_older)
    except BaseException as error:
        disk.close(file)
        if isinstance(error, OSError | CorruptError):
            raise _bad(path, error) from None
        raise
    if accepts and bundle.signer and bundle.signer.trusted:
        trust.accept(bundle.signer.public, bundle.manifest.name, bundle.manifest.serial)
    return bundle


def _verified(path: Path, file: int, allow_unsigned: bool, allow_older: bool) -> Bundle:
    found = disk.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise CorruptError("it is no regular file")
    head = read_head(_read(file, 0, min(HEAD, found.st_size)), found.st_size)
    text = _read(file, HEAD + head.entries, head.manifest)
    signer = _signer(head, text)
    if not (signer and signer.trusted):
        _check_place(path, found, signer, allow_unsigned)
    manifest = read_manifest(text, head)
    if signer and not allow_older:
        _check_age(path, manifest, signer)
    _check_entries(file, manifest)
    return Bundle(path, file, manifest, signer)


def _opened(path: Path) -> int:
    try:
        return disk.open(path, os.O_RDONLY | GUARDED)
    except OSError as error:
        raise _bad(path, "it is a symbolic link" if path.is_symlink() else error) from None


def _signer(head: Head, manifest: bytes) -> Signer | None:
    """Who signed this, None if nobody; raises `CorruptError` for a signature that is bad."""
    message = head.first + manifest
    if not head.signed:
        if checksum(message) != head.signature:
            raise CorruptError("its checksum is of something else: it was changed")
        return None
    if not is_signed(message, head.public, head.signature):
        raise CorruptError("its signature is of something else: it was changed")
    names = [name for name, key in trust.trusted().items() if key == head.public]
    return Signer(head.public, *names[:1])


def _check_place(
    path: Path, found: os.stat_result, signer: Signer | None, allow_unsigned: bool
) -> None:
    """Raises `UntrustedError` for a bundle without a trusted signature, unless ours and allowed."""
    came = f"{path}, signed by {signer}" if signer else f"{path}, which is unsigned"
    if not allow_unsigned:
        todo = (
            "If you know whose key that is: ipex-inductor cache trust add NAME FILE."
            if signer
            else "Sign it with `ipex-inductor cache sign`, or allow it: allow_unsigned=True."
        )
        raise UntrustedError("a bundle signed by a key that you trust", came, todo)
    where = state(path.parent, layer=True)
    refused = why_refused(found, layer=True)
    if refused or not where.private:
        came += f": {f'it {refused}' if refused else where.reason}"
        todo = "Have it signed, or copy it from where you trust it to a folder of yours."
        raise UntrustedError("an unsigned bundle that only you can write", came, todo)


def _check_age(path: Path, manifest: Manifest, signer: Signer) -> None:
    newest = trust.newest(signer.public, manifest.name)
    if manifest.serial < newest:
        came = f"{path}, with serial {manifest.serial}"
        todo = "Get the newer one, or allow this: allow_older=True."
        expected = f"a bundle {manifest.name!r} that is no older than serial {newest}, seen before"
        raise OlderBundleError(expected, came, todo)


def _check_entries(file: int, manifest: Manifest) -> None:
    at = HEAD
    for item in manifest.entries:
        digest, end = hashlib.sha256(), at + item.size
        while at < end:
            part = _read(file, at, min(_CHUNK, end - at))
            digest.update(part)
            at += len(part)
        if digest.hexdigest() != item.sha256:
            raise CorruptError(f"the entry {item.key} was changed")


def _read(file: int, at: int, size: int) -> bytes:
    """Exactly that many bytes: never mapped, as who cuts a mapped file kills its readers."""
    parts = []
    while size:
        part = disk.pread(file, size, at)
        if not part:
            raise CorruptError("it is cut off")
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return b"".join(parts)


def _bad(path: Path, why: object) -> BundleError:
    came = f"{path}: {why.strerror if isinstance(why, OSError) else why}"
    return BundleError("a whole bundle, as it was packed", came, "Get it again, or pack it anew.")

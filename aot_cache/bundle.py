"""Verified bundles, which serve their entries as a read-only tier of the kernel cache.

Trust follows the signature. With a valid signature of a trusted key, the file's owner and mode do
not matter: every entry is checked against the signed manifest again when it is read, through the
file descriptor that was verified. A bundle without a trusted signature is used only if the caller
allows it, and then the file and its folder are checked as those of layers are.
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
    """The signer of a bundle: the name of its key on this machine, "" if it is not trusted."""

    public: bytes
    name: str = ""

    @property
    def is_trusted(self) -> bool:
        """Return whether the signer's key is trusted on this machine."""
        return bool(self.name)

    def __str__(self) -> str:
        return f"{self.name or 'a key that is not trusted'} ({self.public.hex()})"


class Bundle:
    """The entries of a verified bundle, created by `open_bundle`; usable in forked children."""

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
        """Return the bytes stored under `name`; None if they are missing or cannot be used."""
        try:
            return self.load(name)
        except FileNotFoundError:
            return None
        except (OSError, CorruptError) as error:
            say(f"{name} in {self.label} is not used: {error}")
            return None

    def load(self, name: str, head: bool = False) -> bytes:
        """Return the bytes of an entry; with `head`, its key and metadata alone, unverified.

        Raises:
            FileNotFoundError: the bundle has no entry of that name.
            OSError: the file cannot be read.
            CorruptError: the file was changed after it was opened.
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
        """Yield the entries as files of a folder; their time of last use is the bundle's serial."""
        for name, (_, item) in self._where.items():
            yield File(name, item.size, float(self.manifest.serial))


def open_bundle(
    path: Path, allow_unsigned: bool = False, allow_older: bool = False, accepts: bool = True
) -> Bundle:
    """Open a bundle and verify signature, manifest and every byte before an entry is read.

    Args:
        path: File of the bundle.
        allow_unsigned: Also accept a bundle without a signature, or signed by an untrusted key, if
            only you (or root) can write it and its folder.
        allow_older: Also accept a bundle although a newer one was accepted before.
        accepts: Record the bundle as accepted, so that older ones are refused from now on; False
            for callers that only inspect it.

    Raises:
        BundleError: The bundle is not whole; `UntrustedError` and `OlderBundleError` are kinds.
    """
    path = path.absolute()
    file = _open_file(path)
    try:
        bundle = _verify_bundle(path, file, allow_unsigned, allow_older)
    except BaseException as error:
        disk.close(file)
        if isinstance(error, OSError | CorruptError):
            raise _bad(path, error) from None
        raise
    if accepts and bundle.signer and bundle.signer.is_trusted:
        trust.accept(bundle.signer.public, bundle.manifest.name, bundle.manifest.serial)
    return bundle


def _verify_bundle(path: Path, file: int, allow_unsigned: bool, allow_older: bool) -> Bundle:
    """Return the verified bundle read from the descriptor `file`; it stays open on an error."""
    status = disk.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptError("it is no regular file")
    head = read_head(_read(file, 0, min(HEAD, status.st_size)), status.st_size)
    text = _read(file, HEAD + head.entries, head.manifest)
    signer = _signer(head, text)
    if not (signer and signer.is_trusted):
        _check_place(path, status, signer, allow_unsigned)
    manifest = read_manifest(text, head)
    if signer and not allow_older:
        _check_age(path, manifest, signer)
    _check_entries(file, manifest)
    return Bundle(path, file, manifest, signer)


def _open_file(path: Path) -> int:
    """Open a bundle for reading; raise `BundleError` for symbolic links and missing files."""
    try:
        return disk.open(path, os.O_RDONLY | GUARDED)
    except OSError as error:
        raise _bad(path, "it is a symbolic link" if path.is_symlink() else error) from None


def _signer(head: Head, manifest: bytes) -> Signer | None:
    """Return the signer, None if unsigned; raise `CorruptError` if the signature is invalid."""
    message = head.first + manifest
    if not head.has_signature:
        if checksum(message) != head.signature:
            raise CorruptError("its checksum does not match: it was changed")
        return None
    if not is_signed(message, head.public, head.signature):
        raise CorruptError("its signature does not match: it was changed")
    names = [name for name, key in trust.trusted_keys().items() if key == head.public]
    return Signer(head.public, *names[:1])


def _check_place(
    path: Path, status: os.stat_result, signer: Signer | None, allow_unsigned: bool
) -> None:
    """Raise `UntrustedError` without a trusted signature, unless private and allowed."""
    actual = f"{path}, signed by {signer}" if signer else f"{path}, which is unsigned"
    if not allow_unsigned:
        advice = (
            "If you know whose key that is: ipex-inductor cache trust add NAME FILE."
            if signer
            else "Sign it with `ipex-inductor cache sign`, or allow it: allow_unsigned=True."
        )
        raise UntrustedError("a bundle signed by a key that you trust", actual, advice)
    folder = state(path.parent, layer=True)
    refused = why_refused(status, layer=True)
    if refused or not folder.private:
        actual += f": {f'it {refused}' if refused else folder.reason}"
        advice = "Have it signed, or copy it from where you trust it to a folder of yours."
        raise UntrustedError("an unsigned bundle that only you can write", actual, advice)


def _check_age(path: Path, manifest: Manifest, signer: Signer) -> None:
    """Raise `OlderBundleError` if a bundle with a larger serial was accepted before."""
    newest = trust.newest(signer.public, manifest.name)
    if manifest.serial < newest:
        actual = f"{path}, with serial {manifest.serial}"
        advice = "Get the newer one, or allow this: allow_older=True."
        expected = f"a bundle {manifest.name!r} that is no older than serial {newest}, seen before"
        raise OlderBundleError(expected, actual, advice)


def _check_entries(file: int, manifest: Manifest) -> None:
    """Raise `CorruptError` if the SHA-256 of an entry differs from the manifest's."""
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
    """Return exactly `size` bytes at an offset; raise `CorruptError` if the file is shorter.

    The file is never memory-mapped: truncating a mapped file kills the processes that read it.
    """
    parts = []
    while size:
        part = disk.pread(file, size, at)
        if not part:
            raise CorruptError("it is cut off")
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return b"".join(parts)


def _bad(path: Path, why: object) -> BundleError:
    """Return the `BundleError` for a bundle that cannot be read or is not whole."""
    actual = f"{path}: {why.strerror if isinstance(why, OSError) else why}"
    return BundleError(
        "a whole bundle, as it was packed", actual, "Download it again, or pack it again."
    )

"""Creation and signing of bundles from entries that are verified first."""

import hashlib
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from ipex_inductor import __version__
from ipex_inductor.aot_cache import disk, entry
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.folder import SUFFIX, Folder, RefusedError, sync_folder
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.manifest import (
    HEAD,
    Head,
    Item,
    Manifest,
    checksum,
    item_of,
    write_manifest,
)
from ipex_inductor.aot_cache.signing import private_key
from ipex_inductor.aot_cache.survey import check_entry, survey
from ipex_inductor.aot_cache.trust import check_name
from ipex_inductor.errors import ArgumentError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Wanted = Callable[[Mapping[str, Any]], bool]  # of the fields of a key


@dataclass(frozen=True)
class Packed:
    """The manifest of a new bundle, and the reasons why entries were left out, by name."""

    manifest: Manifest
    refused: Mapping[str, str]


def pack(
    folder: Folder,
    out: Path,
    name: str,
    wanted: Wanted = lambda key: True,
    key: Path | None = None,
    serial: int | None = None,
) -> Packed:
    """Pack the wanted entries of a folder into the new file `out`; skip damaged entries.

    Args:
        folder: Folder of entries.
        out: File of the new bundle.
        name: Name of the bundle.
        wanted: Function of a key's fields that selects entries.
        key: File of the private key to sign with; None for an unsigned bundle.
        serial: Serial of the bundle, by default the time in seconds since 1970. Where this bundle
            is accepted, bundles of its name and key with a smaller serial are refused from then on.

    Raises:
        ArgumentError: there is nothing to pack, or `out` exists already.
        KeyFileError: the private key cannot be used.
        RefusedError: the folder must not be used.
        OSError: the folder cannot be read.
    """
    refused: dict[str, str] = {}
    entries = _select_entries(folder, wanted, refused)
    return Packed(_new(out, name, entries, key, serial), refused)


def pack_entries(
    out: Path,
    name: str,
    entries: Mapping[Key, Entry],
    key: Path | None = None,
    serial: int | None = None,
) -> Manifest:
    """Pack these entries into the new file `out`.

    Args:
        out: File of the new bundle.
        name: Name of the bundle.
        entries: Entries by key.
        key: As for `pack`.
        serial: As for `pack`.
    """
    packed = (
        (entry_key, entry.pack(entry_key.framed, value.meta, value.blob))
        for entry_key, value in sorted(entries.items(), key=lambda pair: pair[0].digest)
    )
    items = (
        (item_of(k.digest, len(data), hashlib.sha256(data).hexdigest(), k.fields), data)
        for k, data in packed
    )
    return _new(out, name, items, key, serial)


def _new(
    out: Path,
    name: str,
    entries: Iterable[tuple[Item, bytes]],
    key: Path | None,
    serial: int | None,
) -> Manifest:
    """Write a bundle to a file that must not exist yet; raise `ArgumentError` if it does.

    Args:
        out: File of the new bundle.
        name: Name of the bundle.
        entries: Items of the manifest with the bytes of their entries, by name.
        key: File of the private key, None for an unsigned bundle.
        serial: Serial of the bundle, None for the time in seconds since 1970.
    """
    check_name(name)
    signer = private_key(key) if key else None
    if os.path.lexists(out):
        advice = "Remove it, or choose another name."
        raise ArgumentError("a file to write that is not there yet", f"{out}, which is", advice)
    by = {"ipex_inductor": __version__, "python": platform.python_version()}
    about = Manifest(name, int(time.time()) if serial is None else serial, by, ())
    return _write_bundle(out, about, entries, signer)


def sign(path: Path, key: Path) -> Manifest:
    """Sign a bundle, replacing any earlier signature: the file is verified and then replaced.

    Raises `KeyFileError`; `BundleError` for a bundle that is not whole, or that has no trusted
    signature and that others can write.
    """
    signer = private_key(key)
    bundle = open_bundle(path, allow_unsigned=True, allow_older=True, accepts=False)
    entries = ((item, bundle.load(item.key + SUFFIX)) for item in bundle.manifest.entries)
    return _write_bundle(bundle.path, bundle.manifest, entries, signer)


def _select_entries(
    folder: Folder, wanted: Wanted, refused: dict[str, str]
) -> Iterator[tuple[Item, bytes]]:
    """Yield the wanted entries by name, each verified; add reasons for bad ones to `refused`."""
    for candidate in sorted(survey(folder), key=lambda candidate: candidate.file.name):
        name = candidate.file.name
        if candidate.why:
            refused[name] = candidate.why
        elif wanted(candidate.key):
            try:
                data = folder.load(name)
                fields = check_entry(name, data)
                digest = hashlib.sha256(data).hexdigest()
                item = item_of(name.removesuffix(SUFFIX), len(data), digest, fields)
            except (OSError, RefusedError, ValueError) as error:
                refused[name] = str(error)
            else:
                yield item, data


def _write_bundle(
    out: Path,
    about: Manifest,
    entries: Iterable[tuple[Item, bytes]],
    signer: "Ed25519PrivateKey | None",
) -> Manifest:
    """Write a bundle of these entries; only one of them is in memory at a time."""
    with _publish_file(out) as file:
        file.write(bytes(HEAD))
        items = [(item, file.write(data))[0] for item, data in entries]
        if not items:
            raise ArgumentError("an entry to pack", "none", "`ipex-inductor cache ls` shows all.")
        manifest = msgspec.structs.replace(about, entries=tuple(items))
        text = write_manifest(manifest)
        public = {"public": signer.public_key().public_bytes_raw()} if signer else {}
        head = Head(len(text), manifest.size, **public)
        signature = signer.sign(head.first + text) if signer else checksum(head.first + text)
        file.write(text)
        file.seek(0)
        file.write(head.first + signature)
    return manifest


@contextmanager
def _publish_file(out: Path) -> Iterator[BinaryIO]:
    """Yield a file that gets its name once it is whole and on the disk; else remove it."""
    temp = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(disk.open(temp, _NEW, 0o644), "w+b") as file:
            yield file
            file.flush()
            disk.fsync(file.fileno())
        disk.rename(temp, out)
        sync_folder(out.parent)
    except OSError as error:
        actual = f"{error.filename or out}: {error.strerror}"
        raise ArgumentError(
            "a file that can be written", actual, "Check the path and the free space."
        ) from None
    finally:
        with suppress(OSError):
            disk.unlink(temp)


_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

"""Bundles are made here: of entries that are verified first, with or without a signature."""

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
from ipex_inductor.aot_cache.survey import checked, survey
from ipex_inductor.aot_cache.trust import check_name
from ipex_inductor.errors import ArgumentError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Wanted = Callable[[Mapping[str, Any]], bool]  # of the fields of a key


@dataclass(frozen=True)
class Packed:
    """What is in a new bundle, and why other entries are not, by name."""

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
    """Put the wanted entries of a folder into the new file `out`, signed with the private `key`.

    Bad entries are left out. `serial` is the time unless given; where a bundle was accepted, those
    of its name and key with a smaller one no longer are. Raises `ArgumentError` where there is
    nothing to pack, or `out` is there already; `KeyFileError`; `RefusedError` and `OSError` for
    a folder that cannot be used.
    """
    refused: dict[str, str] = {}
    entries = _chosen(folder, wanted, refused)
    return Packed(_new(out, name, entries, key, serial), refused)


def pack_entries(
    out: Path,
    name: str,
    entries: Mapping[Key, Entry],
    key: Path | None = None,
    serial: int | None = None,
) -> Manifest:
    """Put these entries into the new file `out`; the rest as for `pack`."""
    packed = (
        (entry_key, entry.pack(entry_key.framed, each.meta, each.blob))
        for entry_key, each in sorted(entries.items(), key=lambda pair: pair[0].digest)
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
    check_name(name)
    signer = private_key(key) if key else None
    if os.path.lexists(out):
        todo = "Remove it, or choose another name."
        raise ArgumentError("a file to write that is not there yet", f"{out}, which is", todo)
    by = {"ipex_inductor": __version__, "python": platform.python_version()}
    about = Manifest(name, int(time.time()) if serial is None else serial, by, ())
    return _written(out, about, entries, signer)


def sign(path: Path, key: Path) -> Manifest:
    """Sign a bundle, instead of whoever did before: the file is verified and then replaced.

    Raises `KeyFileError`; `BundleError` for one that is not whole, or that nobody vouches for and
    others can write.
    """
    signer = private_key(key)
    bundle = open_bundle(path, allow_unsigned=True, allow_older=True, accepts=False)
    entries = ((item, bundle.load(item.key + SUFFIX)) for item in bundle.manifest.entries)
    return _written(bundle.path, bundle.manifest, entries, signer)


def _chosen(
    folder: Folder, wanted: Wanted, refused: dict[str, str]
) -> Iterator[tuple[Item, bytes]]:
    """The wanted entries by name, each verified; `refused` gets the reasons for the bad ones."""
    for found in sorted(survey(folder), key=lambda found: found.file.name):
        name = found.file.name
        if found.why:
            refused[name] = found.why
        elif wanted(found.key):
            try:
                data = folder.load(name)
                fields = checked(name, data)
                digest = hashlib.sha256(data).hexdigest()
                item = item_of(name.removesuffix(SUFFIX), len(data), digest, fields)
            except (OSError, RefusedError, ValueError) as error:
                refused[name] = str(error)
            else:
                yield item, data


def _written(
    out: Path,
    about: Manifest,
    entries: Iterable[tuple[Item, bytes]],
    signer: "Ed25519PrivateKey | None",
) -> Manifest:
    """A bundle of these entries; only one of them is in memory at a time."""
    with _published(out) as file:
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
def _published(out: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is whole and on the disk; else nothing is left of it."""
    temp = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(disk.open(temp, _NEW, 0o644), "w+b") as file:
            yield file
            file.flush()
            disk.fsync(file.fileno())
        disk.rename(temp, out)
        sync_folder(out.parent)
    except OSError as error:
        came = f"{error.filename or out}: {error.strerror}"
        raise ArgumentError("a file that can be written", came, "Check path and room.") from None
    finally:
        with suppress(OSError):
            disk.unlink(temp)


_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

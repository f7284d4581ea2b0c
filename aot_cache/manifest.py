"""A bundle as bytes: head, signature, entries, manifest.

    8 bytes   magic
    u16       format version
    u32 u64   lengths of the manifest, and of all entries
    32 bytes  Ed25519 public key, zeros if it is unsigned
    64 bytes  Ed25519 signature of all before it and the manifest; their SHA-512 if it is unsigned
    entries   as entry.py packs them, one after the other, by name
    manifest  canonical JSON, with the length and the SHA-256 of every entry

Nothing is between the parts nor behind them, so the signature covers every byte of the file. Names
are digests of keys: there are no paths in it. Without a signature the checksum detects accidental
damage.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ipex_inductor.aot_cache import entry
from ipex_inductor.aot_cache.entry import CorruptError
from ipex_inductor.aot_cache.signing import PUBLIC, SIGNATURE

MAGIC, VERSION = b"\x89ipexb\r\n", 1
MANIFEST_LIMIT = 1 << 26  # bytes, some hundred thousand entries
_FIRST = struct.Struct(f">8sHIQ{PUBLIC}s")
HEAD = _FIRST.size + SIGNATURE
_UNSIGNED = bytes(PUBLIC)

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # of bundles and of trusted keys

_Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Name = Annotated[str, msgspec.Meta(pattern=rf"\A{NAME}\Z")]
_Size = Annotated[int, msgspec.Meta(ge=entry.HEAD, le=entry.LIMIT)]
_Serial = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Item(msgspec.Struct, frozen=True):
    """A manifest's record of an entry; kind, architecture and so on are copied from its key."""

    key: _Digest  # of the key: the entry's name
    size: _Size  # bytes of the entry
    sha256: _Digest  # of these
    kind: str
    architecture: str
    toolchain: dict[str, str]  # versions of torch, Triton and compilers
    source: str  # the digest of the sources of ours that made it


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a bundle; of two with one name and signer, the larger serial is newer."""

    name: _Name
    serial: _Serial  # seconds since 1970 unless chosen
    provenance: dict[str, str]  # what packed it
    entries: tuple[Item, ...]  # by key

    @property
    def size(self) -> int:
        """Return the bytes of all entries."""
        return sum(item.size for item in self.entries)


@dataclass(frozen=True)
class Head:
    """The head of a bundle: lengths of its parts, public key and signature."""

    manifest: int  # bytes
    entries: int  # bytes
    public: bytes = _UNSIGNED
    signature: bytes = b""

    @property
    def has_signature(self) -> bool:
        """Return whether there is a signature, valid or not."""
        return self.public != _UNSIGNED

    @property
    def size(self) -> int:
        """Return the bytes of the whole file."""
        return HEAD + self.entries + self.manifest

    @property
    def first(self) -> bytes:
        """Return the bytes before the signature, which covers them."""
        return _FIRST.pack(MAGIC, VERSION, self.manifest, self.entries, self.public)


def item_of(name: str, size: int, sha256: str, key: Mapping[str, Any]) -> Item:
    """Return the manifest's record of an entry; raise `CorruptError` for a malformed key.

    Args:
        name: Digest of the key, which is the entry's name.
        size: Bytes of the entry.
        sha256: Digest of these bytes.
        key: Fields of the key.
    """
    kind, arch, source, torch, triton = (
        _to_text(key.get(field, ""))
        for field in ("kind", "architecture", "source", "torch", "triton")
    )
    try:
        tools = {_to_text(tool): _to_text(version) for tool, version in key.get("toolkit", ())}
    except (TypeError, ValueError):
        raise CorruptError("the toolkit of its key is no pairs of names and values") from None
    return Item(name, size, sha256, kind, arch, {**tools, "torch": torch, "triton": triton}, source)


def checksum(message: bytes) -> bytes:
    """Return the SHA-512 that takes the place of a signature in an unsigned bundle."""
    return hashlib.sha512(message).digest()


def read_head(data: bytes, size: int) -> Head:
    """Return the head of a file of `size` bytes; raise `CorruptError` if it is invalid."""
    if len(data) < HEAD:
        raise CorruptError("it is cut off")
    magic, version, manifest, entries, public = _FIRST.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise CorruptError("its magic number or version is not that of a bundle")
    head = Head(manifest, entries, public, data[_FIRST.size : HEAD])
    if manifest > MANIFEST_LIMIT or head.size != size:
        raise CorruptError("its length is another than it says")
    return head


def read_manifest(data: bytes, head: Head) -> Manifest:
    """Return the manifest that `write_manifest` wrote; raise `CorruptError` for other bytes."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        rewritten = write_manifest(manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"its manifest is none: {error}") from None
    keys = [item.key for item in manifest.entries]
    if keys != sorted(set(keys)) or manifest.size != head.entries or rewritten != data:
        raise CorruptError("its manifest is not as ours are, or does not fit the file")
    return manifest


def write_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as canonical JSON; raise `ValueError` if it is too large."""
    data = msgspec.json.encode(manifest, order="deterministic")
    if len(data) > MANIFEST_LIMIT:
        raise ValueError(f"a manifest of {len(data)} bytes: make several bundles")
    return data


def _to_text(value: object) -> str:
    """Return a value as text that JSON can hold."""
    return str(value).encode("utf-8", "replace").decode()

"""An entry as bytes: magic, format version, lengths, digest, key, metadata, blob.

    8 bytes   magic
    u16       format version
    u32 u32   lengths of key and metadata
    u64       length of the blob
    32 bytes  SHA-256 of all the rest, in this order
    key       as `Key.framed`
    metadata  a canonical JSON object
    blob

The digest detects accidental damage. Protection from other writers comes from the folder's checks.
"""

import hashlib
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

MAGIC, VERSION = b"\x89ipexk\r\n", 1
LIMIT = 1 << 30  # bytes of an entry
KEY_LIMIT, META_LIMIT = 1 << 20, 1 << 24
_FIRST = struct.Struct(">8sHIIQ")
_DIGEST = hashlib.sha256().digest_size
HEAD = _FIRST.size + _DIGEST


class CorruptError(ValueError):
    """Bytes that are not a whole entry, or not the expected entry."""


@dataclass(frozen=True)
class Entry:
    """The value stored under a key: the code, and the metadata needed to run it, as plain JSON."""

    meta: Mapping[str, Any]
    blob: bytes


def pack(framed_key: bytes, meta: Mapping[str, Any], blob: bytes) -> bytes:
    """Return the bytes of an entry.

    Raises `TypeError` for metadata that JSON would change, `ValueError` if a part is too large.
    """
    text = _canonical(meta)
    first = _FIRST.pack(MAGIC, VERSION, len(framed_key), len(text), len(blob))
    if reason := _why_too_large(len(framed_key), len(text), len(blob)):
        raise ValueError(reason)
    digest = _digest(first, framed_key, text, blob)
    return b"".join((first, digest, framed_key, text, blob))


def unpack(data: bytes, framed_key: bytes) -> Entry:
    """Return the entry of that key; raise `CorruptError` for any other bytes."""
    key, meta, blob = _parts(data, len(data))
    if data[key] != framed_key:
        raise CorruptError("it holds another key")
    return _decode_entry(data, meta, blob)


def unpack_any(data: bytes) -> tuple[bytes, Entry]:
    """Return the framed key and the entry, whatever its key; raise `CorruptError` if damaged."""
    key, meta, blob = _parts(data, len(data))
    return data[key], _decode_entry(data, meta, blob)


def is_whole(head: bytes, size: int) -> bool:
    """Return whether a file of `size` bytes has the length that its `head` states."""
    with suppress(CorruptError):
        _parts(head, size)
        return True
    return False


def head_end(head: bytes, size: int) -> int:
    """Return the offset where the metadata ends, or the key if `head` is cut before that.

    `size`: bytes of the whole file, which begins with `head`. Raises `CorruptError`.
    """
    key, meta, _ = _parts(head, size)
    return int(meta.stop if meta.stop <= len(head) else key.stop)


def key_and_meta(head: bytes) -> tuple[bytes, bytes]:
    """Return the framed key and the metadata of an entry's head, both unverified.

    `head`: the bytes up to the offset that `head_end` returns. Metadata that is cut gives b"".
    """
    _, _, key, meta, _ = _FIRST.unpack_from(head)
    meta_bytes = head[HEAD + key : HEAD + key + meta]
    return head[HEAD : HEAD + key], meta_bytes if len(meta_bytes) == meta else b""


def _parts(head: bytes, size: int) -> tuple[slice, slice, slice]:
    """Return the slices of key, metadata and blob; raise `CorruptError` for a bad head."""
    if len(head) < HEAD:
        raise CorruptError("it is cut off")
    magic, version, key, meta, blob = _FIRST.unpack_from(head)
    if magic != MAGIC or version != VERSION:
        raise CorruptError("its magic number or version is not that of an entry")
    if HEAD + key + meta + blob != size:
        raise CorruptError("its length is another than it says")
    if reason := _why_too_large(key, meta, blob):
        raise CorruptError(reason)
    start = HEAD + key
    return slice(HEAD, start), slice(start, start + meta), slice(start + meta, size)


def _canonical(meta: Mapping[str, Any]) -> bytes:
    """Return metadata as canonical JSON; raise `TypeError` if decoding changes it."""
    with suppress(TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
        text = msgspec.json.encode(meta, order="deterministic")
        if type(meta) is dict and msgspec.json.decode(text) == meta:
            return text
    raise TypeError(f"metadata must be a dict that JSON gives back as it is; got {meta!r}")


def _why_too_large(key: int, meta: int, blob: int) -> str:
    """Return why parts of these lengths, in bytes, exceed a limit, "" if they do not."""
    fits = key <= KEY_LIMIT and meta <= META_LIMIT and HEAD + key + meta + blob <= LIMIT
    return "" if fits else f"key, metadata or blob is too large: {key}, {meta}, {blob} bytes"


def _decode_entry(data: bytes, meta: slice, blob: slice) -> Entry:
    """Return the entry after checking digest and metadata; raise `CorruptError`."""
    if _digest(data[: _FIRST.size], memoryview(data)[HEAD:]) != data[_FIRST.size : HEAD]:
        raise CorruptError("it changed after it was written: the digest is another")
    try:
        decoded = msgspec.json.decode(data[meta])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"its metadata is no JSON: {error}") from None
    if type(decoded) is not dict:
        raise CorruptError("its metadata is no JSON object")
    return Entry(decoded, data[blob])


def _digest(*parts: bytes | memoryview) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.digest()

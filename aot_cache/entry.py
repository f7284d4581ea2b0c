"""An entry as bytes: magic, format version, lengths, digest, key, metadata, blob.

    8 bytes   magic
    u16       format version
    u32 u32   lengths of key and metadata
    u64       length of the blob
    32 bytes  SHA-256 of all the rest, in this order
    key       as `Key.framed`
    metadata  a canonical JSON object
    blob

The digest shows accidents. That nobody else wrote an entry is for the folder to say.
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
    """Bytes that are no whole entry, or not the entry that they should be."""


@dataclass(frozen=True)
class Entry:
    """What is kept under a key: the code, and what must be known to run it, as plain JSON."""

    meta: Mapping[str, Any]
    blob: bytes


def pack(framed_key: bytes, meta: Mapping[str, Any], blob: bytes) -> bytes:
    """The bytes of an entry.

    Raises `TypeError` for metadata that JSON would give back otherwise, `ValueError` for too much.
    """
    text = _canonical(meta)
    first = _FIRST.pack(MAGIC, VERSION, len(framed_key), len(text), len(blob))
    if reason := _why_too_large(len(framed_key), len(text), len(blob)):
        raise ValueError(reason)
    digest = _digest(first, framed_key, text, blob)
    return b"".join((first, digest, framed_key, text, blob))


def unpack(data: bytes, framed_key: bytes) -> Entry:
    """The entry of that key; raises `CorruptError` for any other bytes."""
    key, meta, blob = _parts(data, len(data))
    if data[key] != framed_key:
        raise CorruptError("it holds another key")
    return _checked(data, meta, blob)


def unpack_any(data: bytes) -> tuple[bytes, Entry]:
    """The framed key and the entry of whatever key; raises `CorruptError`."""
    key, meta, blob = _parts(data, len(data))
    return data[key], _checked(data, meta, blob)


def is_whole(head: bytes, size: int) -> bool:
    """Whether a file of `size` bytes that begins so is as long as it says."""
    with suppress(CorruptError):
        _parts(head, size)
        return True
    return False


def head_end(head: bytes, size: int) -> int:
    """Where the metadata ends in a file of `size` bytes that begins so; the key, if `head` does.

    Raises `CorruptError`.
    """
    key, meta, _ = _parts(head, size)
    return int(meta.stop if meta.stop <= len(head) else key.stop)


def key_and_meta(head: bytes) -> tuple[bytes, bytes]:
    """The framed key and the metadata of what `head_end` ends, unverified; nothing that is cut."""
    _, _, key, meta, _ = _FIRST.unpack_from(head)
    told = head[HEAD + key : HEAD + key + meta]
    return head[HEAD : HEAD + key], told if len(told) == meta else b""


def _parts(head: bytes, size: int) -> tuple[slice, slice, slice]:
    """Where key, metadata and blob stand."""
    if len(head) < HEAD:
        raise CorruptError("it is cut off")
    magic, version, key, meta, blob = _FIRST.unpack_from(head)
    if magic != MAGIC or version != VERSION:
        raise CorruptError("it does not begin as entries do")
    if HEAD + key + meta + blob != size:
        raise CorruptError("its length is another than it says")
    if reason := _why_too_large(key, meta, blob):
        raise CorruptError(reason)
    start = HEAD + key
    return slice(HEAD, start), slice(start, start + meta), slice(start + meta, size)


def _canonical(meta: Mapping[str, Any]) -> bytes:
    with suppress(TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
        text = msgspec.json.encode(meta, order="deterministic")
        if type(meta) is dict and msgspec.json.decode(text) == meta:
            return text
    raise TypeError(f"metadata must be a dict that JSON gives back as it is; got {meta!r}")


def _why_too_large(key: int, meta: int, blob: int) -> str:
    fits = key <= KEY_LIMIT and meta <= META_LIMIT and HEAD + key + meta + blob <= LIMIT
    return "" if fits else f"key, metadata or blob is too large: {key}, {meta}, {blob} bytes"


def _checked(data: bytes, meta: slice, blob: slice) -> Entry:
    if _digest(data[: _FIRST.size], memoryview(data)[HEAD:]) != data[_FIRST.size : HEAD]:
        raise CorruptError("it changed after it was written: the digest is another")
    try:
        found = msgspec.json.decode(data[meta])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"its metadata is no JSON: {error}") from None
    if type(found) is not dict:
        raise CorruptError("its metadata is no JSON object")
    return Entry(found, data[blob])


def _digest(*parts: bytes | memoryview) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.digest()

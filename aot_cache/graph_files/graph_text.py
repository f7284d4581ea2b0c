"""Texts of compiled graphs, stored beside the code to explain how another graph differs."""

import base64
import functools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec

UNLIKE = 0.5  # share of the lines that a graph has in common with another, to be compared with it
LARGEST = 1 << 20  # bytes that a text takes in an entry: larger ones are not kept
LONGEST = 16 << 20  # bytes of a text that is read
WIDTH = 160  # characters of a line that are shown
_NUMBERS = re.compile(r"_\d+\b")  # of names, which shift when an input or an op is added
_FREED = re.compile(r"; +\w+( = \w+)* = None.*")
_INPUT = re.compile(r', (?=\w+: ")')  # of the signature, which is one line
_ALIAS = re.compile(r"\w+ = \w+")


class _Kept(msgspec.Struct):
    """The part of an entry's metadata that holds a graph's text."""

    graph: str = ""


@functools.lru_cache(maxsize=1)
def pack_text(text: str) -> Mapping[str, str]:
    """Return a graph's text as fields of metadata, compressed to about a tenth of its size.

    Empty for no text, or one that is over `LARGEST` bytes compressed.
    """
    packed = base64.b85encode(zlib.compress(text.encode())).decode() if text else ""
    return {"graph": packed} if 0 < len(packed) <= LARGEST else {}


def read_texts(metas: Iterable[bytes]) -> Iterator[str]:
    """Yield the graph texts found in metadata given as JSON; skip metadata without one."""
    for meta in metas:
        with suppress(ValueError, zlib.error, msgspec.MsgspecError):
            packed = msgspec.json.decode(meta, type=_Kept).graph
            if 0 < len(packed) <= LARGEST:
                data = base64.b85decode(packed)
                yield zlib.decompressobj().decompress(data, LONGEST).decode()


def difference(text: str, stored: Iterable[str]) -> str:
    """Return where `text` first differs from the most similar of `stored`, "" if none is similar.

    Among equally similar texts the first is used.
    """
    ours = _lines(text)
    count = _count_lines(ours)
    rated = ((_share(count, _count_lines(lines)), lines) for lines in map(_lines, stored))
    similarity, theirs = max(rated, key=lambda pair: pair[0], default=(0.0, ours))
    if similarity < UNLIKE or ours == theirs:
        return ""
    pairs = zip(ours, theirs, strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return f"{_format_line(ours, first)} here, {_format_line(theirs, first)} there"


def _lines(text: str) -> list[str]:
    """Return one line per input and op, without freed names and plain aliases."""
    lines = (_FREED.sub("", line).strip() for line in _INPUT.sub("\n", text).splitlines())
    bare = (line.removesuffix("):") for line in lines)
    return [line for line in bare if line and not _ALIAS.fullmatch(line)]


def _count_lines(lines: list[str]) -> Counter[str]:
    """Count lines, ignoring the numbers in names, which shift when an op is added."""
    return Counter(_NUMBERS.sub("", line) for line in lines)


def _share(ours: Counter[str], theirs: Counter[str]) -> float:
    """Return the share of lines that two graphs have in common, from 0 to 1."""
    return (ours & theirs).total() / max(ours.total(), theirs.total(), 1)


def _format_line(lines: list[str], number: int) -> str:
    """Return a line for display, cut to `WIDTH` characters."""
    line = lines[number] if number < len(lines) else "nothing more"
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."

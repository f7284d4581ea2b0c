"""The text of a graph beside what was compiled of it: tells what sets another graph apart."""

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
    """Of an entry's metadata."""

    graph: str = ""


@functools.lru_cache(maxsize=1)
def keeping(text: str) -> Mapping[str, str]:
    """What an entry's metadata has of it: it packed, to a tenth of the size."""
    packed = base64.b85encode(zlib.compress(text.encode())).decode() if text else ""
    return {"graph": packed} if 0 < len(packed) <= LARGEST else {}


def kept(metas: Iterable[bytes]) -> Iterator[str]:
    """The texts in metadata, as JSON, that has one."""
    for meta in metas:
        with suppress(ValueError, zlib.error, msgspec.MsgspecError):
            packed = msgspec.json.decode(meta, type=_Kept).graph
            if 0 < len(packed) <= LARGEST:
                data = base64.b85decode(packed)
                yield zlib.decompressobj().decompress(data, LONGEST).decode()


def difference(here: str, others: Iterable[str]) -> str:
    """Where the most alike of `others`, the first of these, first differs from `here`, in words.

    "" if none is alike.
    """
    ours = _lines(here)
    count = _counted(ours)
    told = ((_share(count, _counted(lines)), lines) for lines in map(_lines, others))
    alike, theirs = max(told, key=lambda pair: pair[0], default=(0.0, ours))
    if alike < UNLIKE or ours == theirs:
        return ""
    pairs = zip(ours, theirs, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return f"{_said(ours, same)} here, {_said(theirs, same)} there"


def _lines(text: str) -> list[str]:
    """The inputs on a line each; nothing of what a line frees, nor other names of inputs."""
    lines = (_FREED.sub("", line).strip() for line in _INPUT.sub("\n", text).splitlines())
    bare = (line.removesuffix("):") for line in lines)
    return [line for line in bare if line and not _ALIAS.fullmatch(line)]


def _counted(lines: list[str]) -> Counter[str]:
    return Counter(_NUMBERS.sub("", line) for line in lines)


def _share(ours: Counter[str], theirs: Counter[str]) -> float:
    return (ours & theirs).total() / max(ours.total(), theirs.total(), 1)


def _said(lines: list[str], number: int) -> str:
    line = lines[number] if number < len(lines) else "nothing more"
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."

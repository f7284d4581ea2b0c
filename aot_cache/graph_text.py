"""The text of a graph beside what was compiled of it: tells what sets another graph apart."""

import base64
import re
import zlib
from collections import Counter
from collections.abc import Iterable

UNLIKE = 0.5  # share of the lines that a graph has in common with another, to be compared with it
LONGEST = 16 << 20  # bytes of a text
WIDTH = 160  # characters of a line that are shown
_NUMBERS = re.compile(r"_\d+\b")  # of names, which shift when an input or an op is added
_FREED = re.compile(r"; +\w+( = \w+)* = None.*")


def packed(text: str) -> str:
    """As an entry's metadata has it, a tenth of the size."""
    return base64.b85encode(zlib.compress(text.encode())).decode()


def unpacked(text: object) -> str:
    """What was `packed`, or its beginning. Raises `ValueError` for anything else."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b85decode(str(text)), LONGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not stream.eof and len(data) < LONGEST:
        raise ValueError("it is cut off")
    return data.decode()


def difference(here: str, others: Iterable[str]) -> str:
    """Where the most alike of `others` first differs from `here`, in words; "" if none is alike."""
    ours = _lines(here)
    alike, theirs = max(
        ((_share(ours, lines), lines) for lines in map(_lines, others)), default=(0.0, [])
    )
    if alike < UNLIKE:
        return ""
    pairs = zip(ours, theirs, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return f"{_said(ours, same)} here, {_said(theirs, same)} there"


def _lines(text: str) -> list[str]:
    """The inputs on a line each, and nothing of what a line frees."""
    lines = text.replace(", input_", "\ninput_").splitlines()
    bare = (_FREED.sub("", line).strip().removesuffix("):") for line in lines)
    return [line for line in bare if line]


def _share(ours: list[str], theirs: list[str]) -> float:
    a, b = (Counter(_NUMBERS.sub("", line) for line in lines) for lines in (ours, theirs))
    return (a & b).total() / max(len(ours), len(theirs), 1)


def _said(lines: list[str], number: int) -> str:
    line = lines[number] if number < len(lines) else "nothing more"
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."

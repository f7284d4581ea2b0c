"""Whether a graph that is compiled again comes out as its entry has it.

Torch generates the same sources each time, but for comments that number graphs and name folders.
Its pickles hold times, and compiled objects the folder that they were built in: no two are equal.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import PurePath

SIGNS = {".py": rb"# ", ".cpp": rb"//", ".h": rb"//", ".cu": rb"//"}  # of comments
_COMMENTS = {kind: re.compile(rb"^\s*" + s + rb".*\n?", re.MULTILINE) for kind, s in SIGNS.items()}


@dataclass
class Compared:
    """A graph that was compiled though its entry was there.

    `sources`: how many were generated; `differing`: what of them the entry has otherwise, in words.
    """

    entry: str
    sources: int = 0
    differing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.differing:
            return f"{self.entry[:12]} comes out otherwise: {'; '.join(self.differing)}"
        return f"{self.entry[:12]} comes out the same, {self.sources} sources"


def compare(entry: str, kept: Mapping[str, bytes], built: Mapping[str, bytes]) -> Compared:
    """Hold the files `built` anew against those that the entry of that name holds.

    What only the entry has may be built later: a backward graph is when it is first needed.
    """
    there, here = _codes(kept), _codes(built)
    found = Compared(entry, len(here))
    known = {*there.values()}
    gone = {name: code for name, code in there.items() if code not in {*here.values()}}
    for name, code in here.items():
        if code not in known:
            found.differing.append(f"{name}: {_difference(name, code, gone)}")
    return found


def _codes(files: Mapping[str, bytes]) -> dict[str, bytes]:
    kinds = {name: PurePath(name).suffix for name in sorted(files)}
    return {n: _COMMENTS[k].sub(b"", files[n]) for n, k in kinds.items() if k in SIGNS}


def _difference(name: str, code: bytes, gone: Mapping[str, bytes]) -> str:
    """Where it first differs from what the entry has in its place: what it shares most lines with.

    An entry also has what only its first compilation needed.
    """
    kind, lines = PurePath(name).suffix, code.splitlines()
    others = [gone[at].splitlines() for at in gone if PurePath(at).suffix == kind]
    nearest = max(others, key=lambda other: len({*other} & {*lines}), default=[])
    for here, there in zip_longest(lines, nearest, fillvalue=b""):
        if here != there:
            return f"{_text(here)!r} here, {_text(there)!r} there"
    return "its line ends"


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").strip()[:100]

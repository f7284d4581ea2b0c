"""Comparison of a recompiled graph with its cache entry.

Torch generates identical sources each time, except for comments that number graphs and name
folders. Only sources are compared: pickles hold times, and compiled objects hold the folder they
were built in, so two of them are never equal.
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
    """The result of recompiling a graph that has an entry.

    `sources`: number of generated sources; `differing`: one text for each source that differs from
    the entry.
    """

    entry: str
    sources: int = 0
    differing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.differing:
            return f"{self.entry[:12]} comes out otherwise: {'; '.join(self.differing)}"
        return f"{self.entry[:12]} comes out the same, {self.sources} sources"


def compare(entry: str, entry_files: Mapping[str, bytes], built: Mapping[str, bytes]) -> Compared:
    """Compare the files `built` by a recompilation with `entry_files`, which the entry holds.

    Files that only the entry has are no difference: they may be built later, as a backward graph is
    when it is first needed.
    """
    before, after = _codes(entry_files), _codes(built)
    result = Compared(entry, len(after))
    stored = {*before.values()}
    unmatched = {name: code for name, code in before.items() if code not in {*after.values()}}
    for name, code in after.items():
        if code not in stored:
            result.differing.append(f"{name}: {_difference(name, code, unmatched)}")
    return result


def _codes(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the source files by name, without their comment lines."""
    kinds = {name: PurePath(name).suffix for name in sorted(files)}
    return {n: _COMMENTS[k].sub(b"", files[n]) for n, k in kinds.items() if k in SIGNS}


def _difference(name: str, code: bytes, unmatched: Mapping[str, bytes]) -> str:
    """Return the first line that differs from the entry's most similar source.

    The candidates are the entry's unmatched sources with that suffix, which include files that only
    its first compilation needed; the most similar one shares the most lines.
    """
    kind, lines = PurePath(name).suffix, code.splitlines()
    sources = [unmatched[file].splitlines() for file in unmatched if PurePath(file).suffix == kind]
    nearest = max(sources, key=lambda source: len({*source} & {*lines}), default=[])
    for built_line, stored_line in zip_longest(lines, nearest, fillvalue=b""):
        if built_line != stored_line:
            return f"{_text(built_line)!r} here, {_text(stored_line)!r} there"
    return "its line ends"


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").strip()[:100]

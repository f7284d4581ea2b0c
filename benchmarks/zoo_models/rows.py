"""Which rows `benchmarks/zoo.py` measures, and in which order."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zoo_models import FAMILIES

USUAL = ("fp32", "bf16")


@dataclass(frozen=True)
class Variant:
    """How a model is compiled."""

    training: bool
    dtype: str
    dynamic: bool

    def __str__(self) -> str:
        """Three words."""
        batch = "dynamic" if self.dynamic else "static"
        return f"{'training' if self.training else 'inference'} {self.dtype} {batch}"


def chosen(options: argparse.Namespace) -> list[tuple[str, Variant]]:
    """Return the rows that were asked for, one of each model before the others."""
    wanted = [False] * (options.inference or not options.train)
    wanted += [True] * (options.train or not options.inference)
    batches = [False] * options.static + [True] * options.dynamic
    each = bool(options.all or options.dtype or batches)
    passes: list[list[tuple[str, Variant]]] = [[] for _ in wanted]
    for number, family in enumerate(FAMILIES):
        for place, name in enumerate(FAMILIES[family]):
            if family not in options.family or name not in options.models:
                continue
            first = (number + place // 2) % len(wanted)
            for turn, rows in enumerate(passes):
                training = wanted[(first + turn) % len(wanted)]
                rows += [(name, v) for v in variants(options, training, place, each, batches)]
    index, count = options.shard
    return [row for rows in passes for row in rows][index::count]


def variants(
    options: argparse.Namespace, training: bool, place: int, each: bool, batches: list[bool]
) -> Iterator[Variant]:
    """Yield the variants of the model at `place` of its family, or one by turns if not `each`."""
    turn = place + training
    dtypes = options.dtype or USUAL
    for dtype in dtypes if each else [dtypes[turn % 2]]:
        for dynamic in (batches or [False, True]) if each else [bool(turn // 2 % 2)]:
            yield Variant(training, dtype, dynamic)


def without_known(
    rows: list[tuple[str, Variant]], options: argparse.Namespace, about: dict[str, str]
) -> list[tuple[str, Variant]]:
    """Return the rows that the file lacks of these sources, versions and this device."""
    if not (options.resume and options.json and os.path.exists(options.json)):
        return rows
    facts = [key for key in about if key not in ("date", "command")]
    there = map(json.loads, Path(options.json).read_text().splitlines())
    done = {
        (row["model"], Variant(row["training"], row["dtype"], row["dynamic"]))
        for row in there
        if all(row.get(fact) == about[fact] for fact in facts)
    }
    return [row for row in rows if row not in done]


def shard(text: str) -> tuple[int, int]:
    """Return the index from 0 and the count of `I/N`."""
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise ValueError(text)
    return index - 1, count

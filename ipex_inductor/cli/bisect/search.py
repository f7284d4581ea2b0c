"""Search for the parts that together make a result bad, independent of compilers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Parts = frozenset[str]

REST = "*"  # whatever backend `ipex` still does with every named part off


@dataclass(frozen=True)
class Outcome:
    """Result of a run with some parts off: bad or not, the detail, and the applied parts."""

    bad: bool
    fired: Parts = frozenset()
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """`status` is "found", "fine" (nothing is wrong) or "not ours" (plain Inductor is wrong too).

    Each of `culprits` is a minimal set that is bad together; with `off` left out all is well.
    """

    status: str
    culprits: tuple[tuple[str, ...], ...] = ()
    off: Parts = frozenset()
    detail: str = ""


def search(run: Callable[[Parts | None], Outcome], parts: Parts) -> Finding:
    """Find all culprits among `parts`; `run` gets the parts that are off, None for plain Inductor.

    A part may apply only while another one is off, so each culprit found is switched off and the
    rest is tried again until the result is right: at most 2 log2(parts) runs per culprit.
    """
    run = functools.cache(run)
    first = run(Parts())
    if not first.bad:
        return Finding("fine")
    plain = run(None)
    if plain.bad:
        return Finding("not ours", detail=plain.detail)
    if run(parts).bad:
        return Finding("found", ((REST,),), Parts({REST}), first.detail)

    def bad(on: Parts) -> bool:
        return run(parts - on).bad

    off = Parts()
    culprits = []
    while (outcome := run(off)).bad:
        suspects = sorted(outcome.fired - off)
        if not bad(Parts(suspects)):
            suspects = sorted(parts - off)
        guilty = minimal(suspects, bad)
        culprits.append(tuple(guilty))
        off |= {guilty[0]}
    return Finding("found", tuple(culprits), off, first.detail)


def minimal(parts: Sequence[str], bad: Callable[[Parts], bool]) -> list[str]:
    """Return a minimal subset of `parts` that is bad: no member can be left out.

    Junker's QuickXplain: `bad` must hold for all of `parts` and not for the empty set.
    """

    def find_minimum(fixed: Parts, changed: bool, rest: Sequence[str]) -> list[str]:
        if changed and bad(fixed):
            return []
        if len(rest) == 1:
            return list(rest)
        first_half, second_half = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        second_minimum = find_minimum(fixed | Parts(first_half), True, second_half)
        first_minimum = find_minimum(
            fixed | Parts(second_minimum), bool(second_minimum), first_half
        )
        return first_minimum + second_minimum

    return find_minimum(Parts(), False, parts)

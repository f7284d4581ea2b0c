"""Which of many parts make something bad: a search that knows nothing of compilers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Parts = frozenset[str]

REST = "*"  # all that is done with every named part off, and not by plain Inductor


@dataclass(frozen=True)
class Outcome:
    """What a run with some parts off gave: bad or not, how, and the parts that took part."""

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
    """Find all culprits among `parts`; `run` gets those that are off, None for plain Inductor.

    A part may take part only where another one is off, so what is found is switched off and all
    the rest tried again until the result is right: at most 2 log2(parts) runs a culprit.
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
    """A smallest subset that is bad, none of whose members can be spared.

    Junker's QuickXplain: `bad` must hold for all of `parts` and not for none of them.
    """

    def needed(given: Parts, new: bool, rest: Sequence[str]) -> list[str]:
        if new and bad(given):
            return []
        if len(rest) == 1:
            return list(rest)
        left, right = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        of_right = needed(given | Parts(left), True, right)
        of_left = needed(given | Parts(of_right), bool(of_right), left)
        return of_left + of_right

    return needed(Parts(), False, parts)

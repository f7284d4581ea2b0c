"""Judges a range of seeds and counts: what fired, what was missed, what was wrong."""

import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fuzz import twin
from fuzz.compiled import judge_compiled, suits
from fuzz.generate import PAIRS, generate
from fuzz.program import Program
from fuzz.reduce import reduce
from ipex_inductor.passes import joint


@dataclass(frozen=True)
class Failure:
    """A seed that failed: the message, and the program reduced."""

    seed: int
    message: str
    program: Program

    def text(self) -> str:
        """For a reader: the message and a script."""
        return f"seed {self.seed}: {self.message}\n{self.program.reproducer()}\n"


@dataclass
class Tally:
    """Counts of programs, not of events: a rule that fired twice in one counts once."""

    programs: int = 0
    trained: int = 0
    dynamic: int = 0  # replayed at two sizes
    cpu: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    in_training: Counter[str] = field(default_factory=Counter)  # fired
    tags: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Take the counts of another range."""
        self.programs += other.programs
        self.trained += other.trained
        self.dynamic += other.dynamic
        self.cpu += other.cpu
        self.fired += other.fired
        self.missed += other.missed
        self.in_training += other.in_training
        self.tags += other.tags
        self.failures += other.failures

    def pairs(self) -> float:
        """The share of pairs of product and what follows it that were met."""
        return sum(f"product: {a}, {b}" in self.tags for a, b in PAIRS) / len(PAIRS)

    def silent(self) -> list[str]:
        """Rules that never fired."""
        return sorted(joint.RULE_NAMES - set(self.fired))


def judge_seeds(seeds: Iterable[int], training: bool = True, reduced: int = 1) -> Tally:
    """Judge the programs of `seeds`; the first `reduced` that fail are made small."""
    tally, began = Tally(), time.process_time()
    for seed in seeds:
        program = generate(seed)
        tally.programs += 1
        tally.tags.update(set(program.tags))
        try:
            verdict = twin.judge(program, training)
        except Exception as error:
            small = len(tally.failures) < reduced and isinstance(error, twin.Mismatch)
            program = reduce(program, twin.fails) if small else program
            tally.failures.append(Failure(seed, _message(error), program))
            continue
        tally.trained += verdict.trained
        tally.dynamic += verdict.sizes > 1
        # A rule whose match is Inductor's own to make says "left" where others say "fired".
        tally.fired.update(_subjects(verdict.events, "fired", "left"))
        tally.missed.update(_subjects(verdict.events, "missed"))
        tally.in_training.update(_subjects(verdict.in_training, "fired"))
    tally.cpu = time.process_time() - began
    return tally


def _subjects(events: Iterable[Any], *kinds: str) -> set[str]:
    return {event.subject for event in events if event.kind in kinds}


def compile_seeds(seeds: Iterable[int]) -> Tally:
    """Judge the code generated for those of `seeds` that suit it."""
    tally, began = Tally(), time.process_time()
    for seed in seeds:
        program = generate(seed)
        if not suits(program):
            continue
        tally.programs += 1
        try:
            judge_compiled(program)
        except Exception as error:
            tally.failures.append(Failure(seed, _message(error), program))
    tally.cpu = time.process_time() - began
    return tally


def _message(error: Exception) -> str:
    if isinstance(error, twin.Mismatch):
        return str(error)
    return "".join(traceback.format_exception(error, limit=-3)).strip()

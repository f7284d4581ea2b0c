"""seed -> program: pieces of every family in a row, with noise and near-misses between.

Each rule gets its share: a program holds the next few rules' own patterns beside random pieces.
"""

import dataclasses
import itertools
import random
import re
from contextlib import suppress

import torch

from fuzz import forms
from fuzz.attention import attention
from fuzz.builder import BATCH, LENGTH, Builder
from fuzz.motifs import EPILOGUES, MOTIFS, PRODUCTS, between, dead, product
from fuzz.program import Program

# What the seeds go through in turn, so that each pair gets its share.
PAIRS = [(kind, follows) for kind in PRODUCTS for follows in EPILOGUES]
PIECES = {**MOTIFS, attention: 10}
RULES = 3  # patterns of rules in a program: in 10,000 each fires 177 times or more
PIECE = 0.3  # of the programs have a random one beside the patterns
DYNAMIC = 25  # one program of so many, at three times the cost
OTHER = {BATCH: 9, LENGTH: 10}  # what is tried in the place of the sizes of dynamic programs


def generate(seed: int) -> Program:
    """The program number `seed`; drawn again where pieces do not fit together."""
    for attempt in itertools.count():
        with suppress(RuntimeError):
            return _draw(seed, random.Random(f"{seed}.{attempt}"))
    raise AssertionError("itertools.count ended")


def _draw(seed: int, rng: random.Random) -> Program:
    """A pair or a whole piece, then a few rules' own patterns, then more pieces."""
    drawn = [forms.draw(rng, name) for name in forms.due(seed, RULES)]
    wanted = [rule.dtype for rule in drawn if rule.dtype]
    dtype = rng.choice(wanted or ["float32", "float32", "bfloat16"])
    b = Builder(rng, dtype, seed % DYNAMIC == 0)
    values = []
    if rng.random() < (0.2 if b.dynamic else PIECE):
        first = rng.random() < 0.6
        values.append(product(b, *PAIRS[seed % len(PAIRS)]) if first else _piece(b))
    for rule in drawn:
        found = rule.make(b)
        if found:
            b.tag(f"rule: {rule.name}")
            values.append(found)
    while not values or (rng.random() < 0.1 and len(b.steps) < 14):
        values.append(_piece(b))  # no rule may have a pattern in this dtype on this CPU
    *others, last = values
    b.extra_outputs += others
    program = b.program(_outputs(b, last), b.dtype)
    _run(program)
    return _dynamic(program) if b.dynamic else program


def _run(program: Program) -> None:
    """Raises RuntimeError where eager does; pieces were tried in float64, which no cast parts."""
    dtype = getattr(torch, program.dtype)
    with torch.no_grad():
        program.module(dtype)(*program.inputs(dtype))


def _dynamic(program: Program) -> Program:
    """The program for any sizes, as far as eager agrees to run it with others."""
    both = tuple(OTHER.items())
    for pairs in (both, both[:1], both[1:]):
        with suppress(RuntimeError, StopIteration):
            free = _named(program, pairs)
            _run(free.resized())
            return free
    return program


def _named(program: Program, pairs: tuple[tuple[int, int], ...]) -> Program:
    """The program with names for these sizes, wherever its lines have them or a multiple."""
    names, steps = {}, []
    for number, (size, _) in enumerate(pairs):
        leaf = next(leaf for leaf in program.of_kind("input") if size in leaf.shape)
        names[size] = f"n{number}"
        steps.append((names[size], f"{leaf.name}.shape[{leaf.shape.index(size)}]"))

    def named(match: re.Match) -> str:
        number, factors = int(match.group()), []
        for size, name in names.items():
            while number and number % size == 0:
                number //= size
                factors.append(name)
        return " * ".join([*factors, *[str(number)] * (number != 1 or not factors)])

    lines = [
        (name, re.sub(r"(?<![\w.])(?<!e-)\d+(?![\w.])", named, line))
        for name, line in program.steps
    ]
    used = {name for _, line in lines for name in re.findall(r"\bn\d\b", line)}
    steps = [step for step in steps if step[0] in used]
    return dataclasses.replace(program, steps=(*steps, *lines), dynamic=pairs)


def _piece(b: Builder) -> str:
    (motif,) = b.rng.choices(list(PIECES), PIECES.values())
    b.tag(motif.__name__)
    last = motif(b)
    if b.chance(0.1):
        dead(b, last)
    return between(b, last) if b.chance(0.1) else last


def _outputs(b: Builder, last: str) -> list[str]:
    """The last value and what had a second user; what shares memory is copied."""
    taken: list[str] = []
    if b.chance(0.05):
        b.extra_outputs.append(b.emit(f"{last}.clone()"))
    memory = {b.env[leaf.name].untyped_storage().data_ptr() for leaf in b.leaves}
    for name in dict.fromkeys([*b.extra_outputs, last]):
        own = b.env[name].untyped_storage().data_ptr()
        taken.append(b.emit(f"{name}.clone()") if own in memory else name)
        memory.add(own)
    return taken

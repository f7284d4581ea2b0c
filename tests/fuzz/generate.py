"""seed -> program: pieces of every family in a row, with noise and near-misses between."""

import itertools
import random
from contextlib import suppress

import torch

from fuzz.builder import Builder
from fuzz.motifs import EPILOGUES, MOTIFS, PRODUCTS, between, dead, from_rule, product
from fuzz.program import Program
from ipex_inductor.passes import joint

# What the seeds go through in turn, so that each pair gets its share.
PAIRS = [(kind, follows) for kind in PRODUCTS for follows in EPILOGUES]


def generate(seed: int) -> Program:
    """The program number `seed`; drawn again where pieces do not fit together."""
    for attempt in itertools.count():
        with suppress(RuntimeError):
            return _draw(seed, random.Random(f"{seed}.{attempt}"))
    raise AssertionError("itertools.count ended")


def _draw(seed: int, rng: random.Random) -> Program:
    """A pair or a whole piece, then a rule's own pattern, then more pieces."""
    b = Builder(rng, rng.choice(["float32", "float32", "bfloat16"]))
    last = product(b, *PAIRS[seed % len(PAIRS)]) if rng.random() < 0.6 else _piece(b)
    if rng.random() < 0.4:
        name = joint.RULES[seed % len(joint.RULES)].name
        found = from_rule(b, name)
        if found and found != last:
            b.tag(f"rule: {name}")
            b.extra_outputs.append(last)
            last = found
    while rng.random() < 0.35 and len(b.steps) < 14:
        last = _piece(b)
    program = b.program(_outputs(b, last), b.dtype)
    _run(program)
    return program


def _run(program: Program) -> None:
    """Raises RuntimeError where eager does; pieces were tried in float64, which no cast parts."""
    dtype = getattr(torch, program.dtype)
    with torch.no_grad():
        program.module(dtype)(*program.inputs(dtype))


def _piece(b: Builder) -> str:
    (motif,) = b.rng.choices(list(MOTIFS), MOTIFS.values())
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

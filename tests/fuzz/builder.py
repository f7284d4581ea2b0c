"""Grows a program line by line, running each line so that shapes and values are known."""

import math
import random

import torch

from fuzz.program import NAMES, Leaf, Program, Wide, names_in

LARGE = 50.0  # values grow no further: what follows would be ill-conditioned
BATCH, LENGTH = 7, 11  # of dynamic programs: primes that stand for nothing else in a program


class Builder:
    """`rng` is the only source of chance; `env` holds the value of every name in float64.

    A `dynamic` program has inputs of `BATCH` and `LENGTH`, which are to be any.
    """

    def __init__(self, rng: random.Random, dtype: str, dynamic: bool = False):
        self.rng = rng
        self.dtype = dtype
        self.dynamic = dynamic
        self.norms: list[tuple] = []  # weights of batch norms so far
        self.leaves: list[Leaf] = []
        self.steps: list[tuple[str, str]] = []
        self.extra_outputs: list[str] = []
        self.tags: list[str] = []
        self.env: dict[str, torch.Tensor] = {}

    # Leaves

    def leaf(self, letter, kind, shape, **fill):
        count = sum(leaf.name[0] == letter for leaf in self.leaves)
        leaf = Leaf(f"{letter}{count}", kind, tuple(shape), **fill)
        self.leaves.append(leaf)
        self.env[leaf.name] = leaf.value()
        return leaf.name

    def input(self, *shape, **fill):
        return self.leaf("x", "input", shape, **fill)

    def parameter(self, *shape, **fill):
        """Scaled so that a product with it keeps the size of its input."""
        fan = math.prod(shape[1:]) if len(shape) > 1 else 4
        return self.leaf("w", "parameter", shape, **{"scale": 1 / math.sqrt(max(1, fan)), **fill})

    def buffer(self, *shape, **fill):
        return self.leaf("m", "buffer", shape, **fill)

    # Steps

    def emit(self, line):
        """Append `v = line`, where the line names earlier values; the new name."""
        name = f"v{len(self.steps)}"
        self.env[name] = self.evaluate(line)
        self.steps.append((name, line))
        return name

    def evaluate(self, line):
        """The value of an expression in float64."""
        with torch.no_grad(), Wide():
            return eval(line, {**NAMES, **self.env})

    def shape(self, name):
        return tuple(self.env[name].shape)

    def dim(self, name):
        return self.env[name].dim()

    def calm(self, name):
        """`name`, or what keeps it from growing on; None when nothing can follow it."""
        value = self.env[name]
        if not value.is_floating_point() or value.numel() == 0:
            return None
        if not value.isfinite().all():
            return None
        return self.emit(f"torch.tanh({name} * {1 / 64})") if value.abs().max() > LARGE else name

    # Chance

    def chance(self, probability):
        return self.rng.random() < probability

    def pick(self, *choices):
        return self.rng.choice(choices)

    def batch(self, *sizes):
        """How many samples an input has."""
        return BATCH if self.dynamic and self.chance(0.85) else self.pick(*sizes)

    def length(self, *sizes):
        """How many tokens a sample has, or pixels along a line."""
        return LENGTH if self.dynamic and self.chance(0.5) else self.pick(*sizes)

    def free_sizes(self):
        """What to give to sizes that no weight has."""
        return (BATCH, *[LENGTH] * self.chance(0.5)) if self.dynamic else ()

    def tag(self, tag):
        self.tags.append(tag)

    def program(self, outputs, dtype):
        """What was built, without leaves that nothing reads."""
        used = set(outputs) | {n for _, line in self.steps for n in names_in(line)}
        leaves = tuple(leaf for leaf in self.leaves if leaf.name in used)
        return Program(leaves, tuple(self.steps), tuple(outputs), dtype, tuple(self.tags))

"""Makes a failing program small: fewer lines and leaves, smaller shapes, while it still fails."""

import dataclasses
import re
from collections.abc import Callable, Iterator

import torch

from fuzz.program import Leaf, Program, names_in

Fails = Callable[[Program], bool]


def reduce(program: Program, fails: Fails) -> Program:
    """The smallest program that deleting, shortcutting and shrinking reach; `fails` holds of it."""
    program = dataclasses.replace(program, tags=())
    while True:
        smaller = next((p for p in candidates(program) if runs(p) and fails(p)), None)
        if smaller is None:
            return program
        program = smaller


def candidates(program: Program) -> Iterator[Program]:
    """Programs a little smaller, the largest cut first."""
    for pair in program.dynamic:
        fewer = tuple(other for other in program.dynamic if other != pair)
        yield dataclasses.replace(program, dynamic=fewer)
    for name in program.outputs:
        if len(program.outputs) > 1:
            yield tidy(dataclasses.replace(program, outputs=(name,)))
    for number in reversed(range(len(program.steps))):
        yield from _without(program, number)
    for number, (name, line) in enumerate(program.steps):
        for simpler in _simpler(line):
            steps = list(program.steps)
            steps[number] = (name, simpler)
            yield tidy(dataclasses.replace(program, steps=tuple(steps)))
    yield from _smaller_sizes(program)
    if program.dtype != "float32":
        yield dataclasses.replace(program, dtype="float32")


def tidy(program: Program) -> Program:
    """Without the lines and leaves that no output depends on, unless they write in place."""
    needed, steps = set(program.outputs), []
    for name, line in reversed(program.steps):
        if name in needed or ("_(" in line and names_in(line) & needed):
            needed |= names_in(line)
            steps.append((name, line))
    leaves = tuple(leaf for leaf in program.leaves if leaf.name in needed)
    return dataclasses.replace(program, leaves=leaves, steps=tuple(reversed(steps)))


def runs(program: Program) -> bool:
    """Whether eager takes it, and every leaf is used."""
    try:
        with torch.no_grad():
            for sized in {program, program.resized()}:
                sized.module(torch.float64)(*sized.inputs(torch.float64))
    except Exception:
        return False
    return bool(program.steps)


def _without(program: Program, number: int) -> Iterator[Program]:
    """The program without one line: its result is an earlier value, or a new input."""
    name, line = program.steps[number]
    steps = program.steps[:number] + program.steps[number + 1 :]
    if name in program.outputs and len(program.outputs) > 1:
        outputs = tuple(o for o in program.outputs if o != name)
        yield tidy(dataclasses.replace(program, steps=steps, outputs=outputs))
    shape = _shape(program, name)
    for earlier in sorted(names_in(line)):
        yield tidy(_renamed(program, steps, name, earlier))
    if shape is not None and any(name in names_in(later) for _, later in steps[number:]):
        fresh = f"x{max([-1, *(int(n.name[1:]) for n in program.leaves if n.name[0] == 'x')]) + 1}"
        leaves = (*program.leaves, Leaf(fresh, "input", shape))
        yield tidy(_renamed(dataclasses.replace(program, leaves=leaves), steps, name, fresh))


def _renamed(program: Program, steps: tuple, old: str, new: str) -> Program:
    lines = tuple((n, re.sub(rf"\b{old}\b", new, line)) for n, line in steps)
    outputs = tuple(new if o == old else o for o in program.outputs)
    return dataclasses.replace(program, steps=lines, outputs=outputs)


def _shape(program: Program, name: str) -> tuple[int, ...] | None:
    whole = dataclasses.replace(program, outputs=(name,))
    try:
        with torch.no_grad():
            (value,) = whole.module(torch.float64)(*whole.inputs(torch.float64))
    except Exception:
        return None
    tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
    return tuple(value.shape) if tensor else None


def _simpler(line: str) -> Iterator[str]:
    """The line with one optional part at its plainest."""
    for match in re.finditer(r"\b[wxmv]\d+\b(?=[,)])", line):
        if match.start() > line.find("("):
            yield line[: match.start()] + "None" + line[match.end() :]
    for match in re.finditer(r"(?<=\[)[\d, ]+(?=\])", line):
        numbers = match.group().split(", ")
        for plain in ("1", "0"):
            if any(n not in ("0", "1") for n in numbers):
                yield (
                    line[: match.start()] + ", ".join([plain] * len(numbers)) + line[match.end() :]
                )


def _smaller_sizes(program: Program) -> Iterator[Program]:
    """One size made 1 or 2 wherever it stands, or in one leaf alone."""
    free = {n for pair in program.dynamic for n in pair}
    sizes = {n for leaf in program.leaves for n in leaf.shape if n > 2} - free
    for size in sorted(sizes, reverse=True):
        for new in (1, 2):
            yield _resized(program, {leaf.name for leaf in program.leaves}, size, new)
    for leaf in program.leaves:
        for size in {n for n in leaf.shape if n > 1} - free:
            yield _resized(program, {leaf.name}, size, 1)


def _resized(program: Program, names: set[str], size: int, new: int) -> Program:
    leaves = tuple(
        dataclasses.replace(leaf, shape=tuple(new if n == size else n for n in leaf.shape))
        if leaf.name in names
        else leaf
        for leaf in program.leaves
    )
    return dataclasses.replace(program, leaves=leaves)

"""Generated code against float64, with eager's own error as the yardstick."""

import dataclasses
from collections.abc import Callable

import torch

from fuzz.program import Program
from fuzz.twin import DTYPES, Mismatch, capture, describe, outputs_of, rewrite

# Fused code rounds in other places than eager; four times its error, or of what one rounding of
# everything the program starts from does to the result, and a few units in the last place.
FACTOR, ULPS = 4, 8

# A half-way case rounds either way: the error is 1 whatever was fused.
DISCONTINUOUS = ("round", "masked_fill(~")


def suits(program: Program) -> bool:
    """Whether its result is continuous, so that rounding may be judged."""
    return not any(word in line for _, line in program.steps for word in DISCONTINUOUS)


def judge_compiled(program: Program) -> None:
    """Compile with backend ipex, strict; raises `Mismatch` where it is less exact than eager.

    What a dynamic program is compiled to must do for its other sizes too.
    """
    torch.compiler.reset()
    module = program.module(DTYPES[program.dtype])
    dynamic = bool(program.dynamic) or None
    compiled = torch.compile(module, backend="ipex", options={"strict": True}, dynamic=dynamic)
    for sized in (program, program.resized()) if dynamic else (program,):
        _judge_call(compiled, dataclasses.replace(sized, dynamic=()))


def _judge_call(compiled: Callable, program: Program) -> None:
    dtype = DTYPES[program.dtype]
    inputs = program.inputs(dtype)
    with torch.no_grad():
        got = compiled(*_fresh(inputs))
        eager = program.module(dtype)(*_fresh(inputs))
        exact = _rounded(program, dtype, 0)
        moved = _rounded(program, dtype, torch.finfo(dtype).eps / 2)
    # torch's own decompositions sometimes give other strides than eager, which is no fault of ours.
    untouched, _ = rewrite(capture(program, False), frozenset({"*"}))
    plain = outputs_of(untouched.graph)
    for number, (ours, theirs, true, near) in enumerate(zip(got, eager, exact, moved, strict=True)):
        if describe(ours) not in (describe(theirs), describe(plain[number])):
            raise Mismatch(f"compiled result {number}: {describe(ours)}, not {describe(theirs)}")
        finite = true.isfinite() & near.isfinite() & theirs.isfinite()
        if not finite.any():
            continue
        scale = float(true[finite].abs().max())
        error, own, condition = (
            float((value.double() - true)[finite].abs().max()) for value in (ours, theirs, near)
        )
        bound = FACTOR * (own + condition) + ULPS * torch.finfo(dtype).eps * scale
        if not error <= bound:
            raise Mismatch(f"compiled result {number}: error {error:.1e}, eager's {own:.1e}")


def _rounded(program: Program, dtype: torch.dtype, by: float) -> tuple[torch.Tensor, ...]:
    """The program in float64 on leaves rounded to `dtype`, then moved by the fraction `by`."""
    module = program.module(torch.float64)
    module.load_state_dict(program.module(dtype).state_dict())
    random = torch.Generator().manual_seed(0)

    def move(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        signs = torch.randint(2, value.shape, generator=random) * 2 - 1
        return value.double() * (1 + by * signs)

    for value in (*module.parameters(), *module.buffers()):
        value.copy_(move(value))
    return module(*map(move, program.inputs(dtype)))


def _fresh(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value.clone() for value in values]

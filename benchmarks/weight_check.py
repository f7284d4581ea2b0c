"""What the weight prologue adds to a call in which no weight changed.

    python benchmarks/weight_check.py [number of weights ...]

Prints microseconds a call: the least of interleaved rounds; then what compares the weights in C++,
and what Python reads one by one where that cannot be built or the weights are few.
"""

import sys
import time
from operator import attrgetter

import torch

from ipex_inductor.passes.derived import DerivedWeights
from ipex_inductor.passes.program import Program, Ref, Step
from ipex_inductor.templates.weights_cpp import reader

ROUNDS, CALLS = 300, 10


def main(counts: list[int]) -> None:
    """Print one line for each number of weights."""
    print(f"{'weights':>8} {'check us':>9} {'in C++':>8} {'versions':>9} {'addresses':>10}")
    for count in counts:
        times = least(subjects(count))
        print(f"{count:8} {times[0]:9.1f} {times[1]:8.1f} {times[2]:9.1f} {times[3]:10.1f}")


def subjects(count):
    """The check of `count` weights as `PrologueCode` calls it, then its parts alone."""
    weights = [torch.nn.Parameter(torch.randn(8)) for _ in range(count)]
    double = Step("aten::add.Tensor", (Ref(0), Ref(0)), ())
    programs = [Program((i,), ("",), (double,), (Ref(1),)) for i in range(count)]
    derived = DerivedWeights(programs, captured=False)
    inputs = [*weights, torch.randn(8)]
    version, found = attrgetter("_version"), reader()
    told, same = (found.read(tuple(weights)), found.same(range(count))) if found else (b"", None)
    derived.of(inputs)
    return (
        lambda: derived.of(inputs),
        lambda: same and same(inputs, told),
        lambda: list(map(version, weights)),
        lambda: list(map(torch.Tensor.data_ptr, weights)),
    )


def least(functions):
    """The least microseconds each of `functions` took, in interleaved rounds."""
    times = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for number, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            times[number] = min(times[number], (time.perf_counter() - start) / CALLS * 1e6)
    return times


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [100, 300, 1000])

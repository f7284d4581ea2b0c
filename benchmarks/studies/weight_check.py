"""Measure what the check of weights adds to a call in which no weight changed.

    python -m benchmarks weight_check [--elements N] [--device cuda] [number of weights ...]

Prints microseconds a call, the least of interleaved rounds: the whole check as a graph runs it;
then, in C++, identities, versions and addresses alone; with a sample of each weight's contents; and
with the rotating comparison, or a query of the kernel. The last column is the number of calls after
which all contents were compared once. On a GPU samples and the rotating comparison are one launch:
its microseconds without and with a wait for the result. The whole check waits, as for a graph that
cannot be repeated; for others the host waits while the graph runs.
"""

import argparse
import time

import torch

from ipex_inductor.passes.weights.derived import DerivedWeights
from ipex_inductor.passes.weights.program import Program, Ref, Step
from ipex_inductor.templates.tensor_reader.weights_cpp import Contents, reader

ROUNDS, CALLS = 300, 10


def main(counts: list[int], elements: int, device: str) -> None:
    """Print one line for each number of weights."""
    titles = ("weights", "MiB", "check us", "facts", "samples", "in turn", "calls for all")
    print("".join(f"{title:>14}" for title in titles))
    for count in counts:
        weights, functions, calls = timed_functions(count, elements, device)
        times = least_times(functions)
        size = sum(w.nbytes for w in weights) / 2**20
        times = [f"{time:.1f}" for time in times]
        cells = (f"{count}", f"{size:.1f}", *times, *["-"] * (4 - len(times)), f"{calls}")
        print("".join(f"{cell:>14}" for cell in cells))


def timed_functions(count: int, elements: int, device: str):
    """Return the check of `count` weights as `PrologueCode` calls it, then its parts alone."""
    weights = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(count)]
    double = Step("aten::sum", (Ref(0),), ())
    programs = [Program((i,), ("",), (double,), (Ref(1),)) for i in range(count)]
    derived = DerivedWeights(programs, captured=False)
    inputs = [*weights, torch.randn(8, device=device)]
    derived.of(inputs)
    (snapshot,) = derived._snapshots.values()
    current, built = snapshot.current, reader()
    assert current is not None
    assert built is not None, "no C++ compiler is here"
    changed = built.make_comparer(range(count))
    read, contents = current.read, current.contents
    if current.on_devices is not None:
        current.on_devices.launch()  # the first makes what compares
        ((_, comparer),) = current.on_devices.comparers
        functions = (
            lambda: derived.of(inputs),
            lambda: changed(inputs, read, None),
            comparer.launch,
            lambda: comparer.find_differing(comparer.launch()),
        )
        return weights, functions, -(-comparer.total // comparer._in_turn)
    alone = Contents(contents.weights, (0, 0))
    functions = (
        lambda: derived.of(inputs),
        lambda: changed(inputs, read, None),
        lambda: changed(inputs, read, alone),
        lambda: changed(inputs, read, contents),
    )
    return weights, functions, calls_for_all(contents)


def calls_for_all(contents) -> int:
    """Return the number of calls after which every weight was compared or queried."""
    watched = [hashes.pages for hashes in contents.weights if hashes.pages]
    unwatched = contents.total - sum(pages.size for pages in watched)
    asked = -(-len(watched) // contents.asks) if watched else 1
    return max(asked, -(-unwatched // contents.limits[0]))


def least_times(functions):
    """Return the least microseconds of each of `functions`, in interleaved rounds."""
    times = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for number, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            times[number] = min(times[number], (time.perf_counter() - start) / CALLS * 1e6)
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("counts", nargs="*", type=int, default=[6, 100, 300, 1000])
    parser.add_argument("--elements", type=int, default=87_000, help="of a weight")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    main(arguments.counts, arguments.elements, arguments.device)

"""The process that measures: `python -m ipex_inductor.lowerings.tune.tuner`, see `autotune.child`.

A problem's candidates are whole compiled graphs, op and epilogue, that differ in the one choice.
As many are compiled at once as Inductor has workers; nothing is, while anything is measured.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.autotune import child, measure, timers
from ipex_inductor.autotune.cost import Model
from ipex_inductor.autotune.measure import Candidate, Judge, Round, Run, Runner
from ipex_inductor.autotune.ranges import points
from ipex_inductor.autotune.record import Choice, Outcome, Problem, Record, Timing, encode
from ipex_inductor.autotune.select import cost_model
from ipex_inductor.autotune.told import microseconds
from ipex_inductor.lowerings.problem import settings
from ipex_inductor.lowerings.problem.provenance import provenance_of
from ipex_inductor.lowerings.problem.selector_hook import Choosing, Offer, choosing
from ipex_inductor.lowerings.problem.workload import function_of, inputs_of, widened
from ipex_inductor.lowerings.select import library, peaks
from ipex_inductor.lowerings.tune import compiling
from ipex_inductor.lowerings.tune.compiling import OPTIONS
from ipex_inductor.lowerings.tune.parallel_compile import Graphs, Tried, tried
from ipex_inductor.target import device as target

# What Inductor kept of earlier measurements, on this machine or others, is of unknown age.
ANEW: dict[str, Any] = {"autotune_local_cache": False, "autotune_remote_cache": False}
QUIETLY: dict[str, Any] = {"autotune_num_choices_displayed": 0}


@dataclass(frozen=True)
class Trial:
    """One set of sizes that a problem is measured at: its inputs, and what is to come of them."""

    problem: Problem
    inputs: tuple[Tensor, ...]
    judge: Judge


# Of long lists, so many templates are measured that the cost model thinks fastest: on an H200 the
# best of all was among them but for 0.2 % of time (5.7 % in the worst of 60 problems).
LIKELY = 12
# Where there is no model so many, no more than so many times slower than the fastest, both by what
# Inductor times of them in passing: without epilogue, without verification, roughly.
FINALISTS, HOPELESS = 8, 1.3
PRUNED = ("cuda", "xpu")  # on CPUs its word may be off by a thousand times
WORKED = ("cuda", "xpu")  # Inductor has workers for Triton's kernels
NOBODY = -1  # of the choices is at work


class Tuner:
    """Measures one problem after the other on one device of this machine."""

    def __init__(self, say: child.Say) -> None:
        self._say = say

    def tune(self, problem: Problem, out: Sequence[Outcome], seconds: float) -> Record:
        """The outcomes of all choices. Those in `out` failed before and are not tried again.

        Raises `ValueError` for a problem that is not this machine's, or that Inductor lowers as
        another one.
        """
        deadline = time.monotonic() + seconds
        device = _device(problem)
        settings.apply(device.type, problem.settings)
        if device.type in WORKED:
            compat.start_workers()
        trials = []
        for point in points(problem):
            self._say.doing(NOBODY)
            trials.append(_trial(point, device))
        self._say.doing(NOBODY)
        default, offer = compiling.offered(problem, trials[0].inputs)
        self._say.choices(offer.choices)
        outcomes = [o for o in out if o.choice in offer.choices]
        if problem.op not in library.CALLS:
            tried(default.waited)  # or it would compile while Inductor times the others
        passed, order = self._narrowed(problem, offer, trials, device)
        outcomes += [o for o in passed if o.choice not in [known.choice for known in outcomes]]
        known = {encode(o.choice) for o in outcomes}
        usual = offer.choices.index(offer.taken)
        if encode(offer.taken) in known:
            tried(default.waited)  # nobody else will
        order.sort(key=lambda i: i != usual)  # it is begun
        left = deque(i for i in order if encode(offer.choices[i]) not in known)
        graphs = Graphs(problem, offer.choices, trials[0].inputs, {usual: default}, self._say.doing)
        wrong, candidates = self._candidates(graphs, left, trials, deadline)
        outcomes += wrong
        raced = self._raced(candidates, trials, device, deadline) if candidates else []
        outcomes += raced
        if not any(o.timing for o in raced):  # then nothing was passed over for anything
            outcomes = [o for o in outcomes if o.reason]
        if not outcomes:
            raise ValueError("the time was up before anything was measured")
        listed = {encode(c): i for i, c in enumerate(offer.choices)}
        outcomes.sort(key=lambda o: listed[encode(o.choice)])
        return Record(problem, tuple(outcomes), provenance_of(device))

    def _narrowed(
        self, problem: Problem, offer: Offer, trials: Sequence[Trial], device: torch.device
    ) -> tuple[list[Outcome], list[int]]:
        """What is passed over of a long list; the numbers of all, as they are to be tried.

        Those come first that would be missed most, should the time be up.
        """
        passed: list[Outcome] = []
        ranked: list[tuple[float, Choice]] = []
        listed = problem.op not in library.CALLS  # a list of Inductor's
        if listed and len(offer.choices) > FINALISTS and device.type in PRUNED:
            self._say.doing(NOBODY)
            ranked = _ranked(trials[0].problem, offer, cost_model(problem.arch))
            passed = (
                [Outcome(choice, predicted=time) for time, choice in ranked[LIKELY:]]
                if ranked
                else _passed_over(problem, offer, trials[0].inputs)
            )
        place = {encode(choice): i for i, (_, choice) in enumerate(ranked)}
        others = {"library": -1, "template": len(ranked)}
        keys = [place.get(encode(c), others[c.kind]) for c in offer.choices]
        return passed, sorted(range(len(keys)), key=keys.__getitem__)

    def _candidates(
        self, graphs: Graphs, left: deque[int], trials: Sequence[Trial], deadline: float
    ) -> tuple[list[Outcome], list[tuple[int, Candidate, float]]]:
        """Of the choices with the numbers in `left`: what is wrong, and what is right by how much.

        Past the deadline no more are tried, but that two are to be right.
        """
        wrong: list[Outcome] = []
        right: list[tuple[int, Candidate, float]] = []
        while tried := graphs.next(left, 2 - len(right), deadline):
            for i, graph in tried.items():
                self._say.doing(i)
                found = _candidate(graphs.choices[i], graph, trials)
                if isinstance(found, Outcome):
                    wrong.append(found)
                else:
                    right.append((i, *found))
        return wrong, right

    def _raced(
        self,
        candidates: Sequence[tuple[int, Candidate, float]],
        trials: Sequence[Trial],
        device: torch.device,
        deadline: float,
    ) -> list[Outcome]:
        """The outcomes of what was right, after the race and a second look at its results."""
        runners = [Runner(candidate, error) for _, candidate, error in candidates]
        numbers = {id(r): i for r, (i, _, _) in zip(runners, candidates, strict=True)}
        self._say.doing(NOBODY)
        buffers, clock, seeds = _buffers(trials, device), timers.clock_of(device), itertools.count()

        def place() -> Callable[[Run], Round]:
            here = timers.moved(buffers, next(seeds))
            return lambda run: clock.prepare(run, here, len(trials))

        say = self._say.doing
        measure.race(runners, place, deadline=deadline, say=lambda r: say(numbers[id(r)]))
        timed = [r for r in runners if not r.failure]
        failed = [Outcome(r.candidate.choice, reason=r.failure) for r in runners if r.failure]
        times = measure.timings(timed) if timed else []
        return failed + [_outcome(*each, trials) for each in zip(timed, times, strict=True)]


def _trial(problem: Problem, device: torch.device) -> Trial:
    inputs = inputs_of(problem, device, seed=0)
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    with torch.no_grad():
        exact, eager = function_of(widened(problem))(*wide), function_of(problem)(*inputs)
    return Trial(problem, tuple(inputs), Judge(exact, eager))


def _candidate(
    choice: Choice, graph: Tried, trials: Sequence[Trial]
) -> Outcome | tuple[Candidate, float]:
    """With its error, if it compiled and is right."""
    if isinstance(graph, Exception):
        return Outcome(choice, reason=f"it does not compile: {measure.first_line(graph)}")
    candidate = Candidate(choice, graph.run, graph.takes())
    found = _verified(candidate, trials)
    return found if isinstance(found, Outcome) else (candidate, found)


def _verified(candidate: Candidate, trials: Sequence[Trial]) -> Outcome | float:
    """The largest error of all sizes, or the first outcome that is out."""
    errors = []
    for trial in trials:
        found = measure.verified(candidate, trial.judge, trial.inputs)
        if isinstance(found, Outcome):
            return found
        errors.append(found)
    return max(errors)


def _buffers(trials: Sequence[Trial], device: torch.device) -> list[list[Tensor]]:
    """Inputs of all sizes in turns, more than the caches hold; who writes to them harms nobody."""
    size = sum(t.untyped_storage().nbytes() for trial in trials for t in trial.inputs)
    count = timers.buffers_against_caches(device, size)
    return [inputs_of(t.problem, device, seed) for seed in range(count) for t in trials]


def _outcome(runner: Runner, timing: Timing, trials: Sequence[Trial]) -> Outcome:
    again = _verified(runner.candidate, trials)
    if isinstance(again, Outcome):
        return again  # right at first, and not any more
    bandwidth, rate = peaks.shares([t.problem for t in trials], timing.p50)
    outcome = Outcome(
        runner.candidate.choice,
        timing,
        error=max(again, runner.error),
        tolerance=max(t.judge.tolerance for t in trials),
        bandwidth=bandwidth,
        rate=rate,
    )
    return replace(outcome, **runner.candidate.takes)


def _ranked(problem: Problem, offer: Offer, model: Model | None) -> list[tuple[float, Choice]]:
    """The templates with what the model says they take, fastest first; those it knows.

    None at all if there is one of a name that it never met: of that it cannot say what is likely.
    """
    templates = [choice for choice in offer.choices if choice.kind == "template"]
    if model is None or not {choice.name for choice in templates} <= {*model.templates}:
        return []
    said = ((model.microseconds(problem, choice), choice) for choice in templates)
    times = [(time, choice) for time, choice in said if time is not None]
    return sorted(times, key=lambda each: (each[0], encode(each[1])))


def _passed_over(problem: Problem, offer: Offer, inputs: Sequence[Tensor]) -> list[Outcome]:
    """What is too slow to be measured beside the others, by Inductor's word; never the library.

    It compiles them all at once, and measures in processes of its own what may crash.
    """
    now = Choosing(watches=True)
    with choosing(now):
        subprocess = {"autotune_in_subproc": inputs[0].is_cuda}
        options = OPTIONS | ANEW | QUIETLY | subprocess
        compiling.lowered(problem, inputs, options, waits=True)
    heard = [h.times for h in now.heard if h.problem == problem]
    told = {encode(choice): microseconds(ms) for times in heard for choice, ms in times}
    times = {key: time for key, time in told.items() if time is not None}
    limit = min(times.values(), default=math.inf) * HOPELESS
    entered = sorted((t, k) for k, t in times.items() if t <= limit)[:FINALISTS]
    kept = {key for _, key in entered}
    return [
        Outcome(choice, reported=times[key])
        for choice in offer.choices
        if (key := encode(choice)) in times and key not in kept and choice.kind != "library"
    ]


def _device(problem: Problem) -> torch.device:
    """The device of this machine that the problem is of."""
    for kind in ("cuda", "xpu", "cpu"):
        if kind != "cpu" and not getattr(torch, kind).is_available():
            continue
        if str(target.current(kind)) == problem.arch:
            return torch.device(kind)
    raise ValueError(f"no device here is {problem.arch}")


def main() -> None:
    """Serve until the parent closes the pipe."""
    child.serve(lambda say: Tuner(say).tune)


if __name__ == "__main__":
    main()

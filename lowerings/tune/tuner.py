"""Measuring process: `python -m ipex_inductor.lowerings.tune.tuner`, see `autotune.child`.

A problem's candidates are whole compiled graphs, op and epilogue, that differ in the one choice. As
many are compiled at once as Inductor has workers. Nothing compiles while anything is measured.
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
from ipex_inductor.autotune.foreign.told import microseconds
from ipex_inductor.autotune.measure import Candidate, Judge, Round, Run, Runner
from ipex_inductor.autotune.ranges import points
from ipex_inductor.autotune.record import Choice, Outcome, Problem, Record, Timing, encode
from ipex_inductor.autotune.select import cost_model
from ipex_inductor.lowerings.problem import settings
from ipex_inductor.lowerings.problem.provenance import provenance_of
from ipex_inductor.lowerings.problem.selector_hook import Choosing, Offer, choosing
from ipex_inductor.lowerings.problem.workload import function_of, inputs_of, to_float64
from ipex_inductor.lowerings.select import library, peaks
from ipex_inductor.lowerings.tune import compiling
from ipex_inductor.lowerings.tune.compiling import OPTIONS
from ipex_inductor.lowerings.tune.parallel_compile import Graphs, Tried, try_compile
from ipex_inductor.target import device as target

# Inductor's caches of earlier measurements, local or remote, are of unknown age, so they are off.
ANEW: dict[str, Any] = {"autotune_local_cache": False, "autotune_remote_cache": False}
QUIETLY: dict[str, Any] = {"autotune_num_choices_displayed": 0}


@dataclass(frozen=True)
class Trial:
    """Hold one set of sizes that a problem is measured at: its inputs and the expected results."""

    problem: Problem
    inputs: tuple[Tensor, ...]
    judge: Judge


# Number of templates of a long list that are measured: the fastest by the cost model. On an H200
# their best was within 0.2 % of the time of the best of all (5.7 % in the worst of 60 problems).
LIKELY = 12
# Without a model, FINALISTS templates are measured that are at most HOPELESS times slower than the
# fastest. Both go by Inductor's own rough times, taken without epilogue and verification.
FINALISTS, HOPELESS = 8, 1.3
PRUNED = ("cuda", "xpu")  # On CPUs Inductor's times may be off by a factor of a thousand.
WORKED = ("cuda", "xpu")  # Inductor has workers for Triton kernels.
NOBODY = -1  # index that means that no candidate is worked on


class Tuner:
    """Measure one problem after the other on one device of this machine."""

    def __init__(self, say: child.Say) -> None:
        self._say = say

    def tune(self, problem: Problem, out: Sequence[Outcome], seconds: float) -> Record:
        """Measure all candidates of `problem` and return the record.

        Args:
            problem: problem to measure.
            out: outcomes of candidates that failed before and are not tried again.
            seconds: time limit.

        Raises:
            ValueError: the problem is of another device, Inductor lowers it as another one, or the
                time was up before anything was measured.
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
        default, offer = compiling.list_candidates(problem, trials[0].inputs)
        self._say.choices(offer.choices)
        outcomes = [o for o in out if o.choice in offer.choices]
        if problem.op not in library.CALLS:
            try_compile(
                default.wait_compiled
            )  # Otherwise it would compile while Inductor times the others.
        passed, order = self._narrow_candidates(problem, offer, trials, device)
        outcomes += [o for o in passed if o.choice not in [done.choice for done in outcomes]]
        finished = {encode(o.choice) for o in outcomes}
        default_index = offer.choices.index(offer.taken)
        if encode(offer.taken) in finished:
            try_compile(default.wait_compiled)  # Nothing else waits for it.
        order.sort(key=lambda i: i != default_index)  # The default graph is already started.
        pending = deque(i for i in order if encode(offer.choices[i]) not in finished)
        graphs = Graphs(
            problem, offer.choices, trials[0].inputs, {default_index: default}, self._say.doing
        )
        wrong, candidates = self._verify_candidates(graphs, pending, trials, deadline)
        outcomes += wrong
        measured = self._race_candidates(candidates, trials, device, deadline) if candidates else []
        outcomes += measured
        # Without a measured candidate, no other one was skipped in its favor.
        if not any(o.timing for o in measured):
            outcomes = [o for o in outcomes if o.reason]
        if not outcomes:
            raise ValueError("the time was up before anything was measured")
        listed = {encode(c): i for i, c in enumerate(offer.choices)}
        outcomes.sort(key=lambda o: listed[encode(o.choice)])
        return Record(problem, tuple(outcomes), provenance_of(device))

    def _narrow_candidates(
        self, problem: Problem, offer: Offer, trials: Sequence[Trial], device: torch.device
    ) -> tuple[list[Outcome], list[int]]:
        """Return outcomes of skipped candidates, and all indices in the order of measuring.

        The candidates that matter most come first, as the time may be up before the last.

        Args:
            problem: problem to measure.
            offer: candidates of the problem.
            trials: sizes that the problem is measured at.
            device: device to measure on.
        """
        passed: list[Outcome] = []
        ranked: list[tuple[float, Choice]] = []
        listed = problem.op not in library.CALLS  # a list of Inductor's
        if listed and len(offer.choices) > FINALISTS and device.type in PRUNED:
            self._say.doing(NOBODY)
            ranked = _rank_templates(trials[0].problem, offer, cost_model(problem.arch))
            passed = (
                [Outcome(choice, predicted=time) for time, choice in ranked[LIKELY:]]
                if ranked
                else _skip_slow(problem, offer, trials[0].inputs)
            )
        rank = {encode(choice): i for i, (_, choice) in enumerate(ranked)}
        rank_by_kind = {"library": -1, "template": len(ranked)}
        keys = [rank.get(encode(c), rank_by_kind[c.kind]) for c in offer.choices]
        return passed, sorted(range(len(keys)), key=keys.__getitem__)

    def _verify_candidates(
        self, graphs: Graphs, pending: deque[int], trials: Sequence[Trial], deadline: float
    ) -> tuple[list[Outcome], list[tuple[int, Candidate, float]]]:
        """Compile and verify candidates; return the outcomes of wrong ones and the correct ones.

        Past the deadline only so many are tried that two are correct.

        Args:
            graphs: graphs of the candidates.
            pending: indices of the candidates to compile.
            trials: sizes to verify at.
            deadline: time of `time.monotonic` after which no further candidates are tried.

        Returns:
            Failed outcomes, and for each correct candidate its index, itself and its error.
        """
        wrong: list[Outcome] = []
        right: list[tuple[int, Candidate, float]] = []
        while compiled := graphs.next(pending, 2 - len(right), deadline):
            for i, graph in compiled.items():
                self._say.doing(i)
                result = _candidate(graphs.choices[i], graph, trials)
                if isinstance(result, Outcome):
                    wrong.append(result)
                else:
                    right.append((i, *result))
        return wrong, right

    def _race_candidates(
        self,
        candidates: Sequence[tuple[int, Candidate, float]],
        trials: Sequence[Trial],
        device: torch.device,
        deadline: float,
    ) -> list[Outcome]:
        """Measure the correct candidates in turns, verify them again, and return the outcomes.

        Args:
            candidates: index, candidate and error of each.
            trials: sizes to measure at.
            device: device to measure on.
            deadline: time of `time.monotonic` at which measuring stops.
        """
        runners = [Runner(candidate, error) for _, candidate, error in candidates]
        numbers = {id(r): i for r, (i, _, _) in zip(runners, candidates, strict=True)}
        self._say.doing(NOBODY)
        buffers, clock, seeds = _buffers(trials, device), timers.clock_of(device), itertools.count()

        def place() -> Callable[[Run], Round]:
            moved_buffers = timers.relocate_buffers(buffers, next(seeds))
            return lambda run: clock.prepare(run, moved_buffers, len(trials))

        say = self._say.doing
        measure.race(runners, place, deadline=deadline, say=lambda r: say(numbers[id(r)]))
        timed = [r for r in runners if not r.failure]
        failed = [Outcome(r.candidate.choice, reason=r.failure) for r in runners if r.failure]
        times = measure.timings(timed) if timed else []
        return failed + [_outcome(*pair, trials) for pair in zip(timed, times, strict=True)]


def _trial(problem: Problem, device: torch.device) -> Trial:
    inputs = inputs_of(problem, device, seed=0)
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    with torch.no_grad():
        exact = function_of(to_float64(problem), library.EXACT.get(problem.op))(*wide)
        eager = function_of(problem)(*inputs)
    return Trial(problem, tuple(inputs), Judge(exact, eager))


def _candidate(
    choice: Choice, graph: Tried, trials: Sequence[Trial]
) -> Outcome | tuple[Candidate, float]:
    """Return the compiled candidate with its error, or the outcome if it failed or is wrong."""
    if isinstance(graph, Exception):
        return Outcome(choice, reason=f"it does not compile: {measure.first_line(graph)}")
    candidate = Candidate(choice, graph.run, graph.takes())
    error = _verify(candidate, trials)
    return error if isinstance(error, Outcome) else (candidate, error)


def _verify(candidate: Candidate, trials: Sequence[Trial]) -> Outcome | float:
    """Return the largest error over all sizes, or the outcome of the first failure."""
    errors = []
    for trial in trials:
        error = measure.verify_candidate(candidate, trial.judge, trial.inputs)
        if isinstance(error, Outcome):
            return error
        errors.append(error)
    return max(errors)


def _buffers(trials: Sequence[Trial], device: torch.device) -> list[list[Tensor]]:
    """Return sets of inputs, of all sizes in turn, that together exceed the device's caches.

    The inputs are used for timing only, so a kernel that writes to them does no harm.
    """
    size = sum(t.untyped_storage().nbytes() for trial in trials for t in trial.inputs)
    count = timers.buffers_against_caches(device, size)
    return [inputs_of(t.problem, device, seed) for seed in range(count) for t in trials]


def _outcome(runner: Runner, timing: Timing, trials: Sequence[Trial]) -> Outcome:
    error = _verify(runner.candidate, trials)
    if isinstance(error, Outcome):
        return error  # It was correct at first, but is not any more.
    bandwidth, rate = peaks.shares([t.problem for t in trials], timing.p50)
    outcome = Outcome(
        runner.candidate.choice,
        timing,
        error=max(error, runner.error),
        tolerance=max(t.judge.tolerance for t in trials),
        bandwidth=bandwidth,
        rate=rate,
    )
    return replace(outcome, **runner.candidate.takes)


def _rank_templates(
    problem: Problem, offer: Offer, model: Model | None
) -> list[tuple[float, Choice]]:
    """Return the templates with their predicted microseconds, fastest first.

    Templates without a prediction are left out. The list is empty if any template has a name
    that the model does not know, as the model cannot rank such a list.
    """
    templates = [choice for choice in offer.choices if choice.kind == "template"]
    if model is None or not {choice.name for choice in templates} <= {*model.templates}:
        return []
    predictions = ((model.microseconds(problem, choice), choice) for choice in templates)
    times = [(time, choice) for time, choice in predictions if time is not None]
    return sorted(times, key=lambda timed: (timed[0], encode(timed[1])))


def _skip_slow(problem: Problem, offer: Offer, inputs: Sequence[Tensor]) -> list[Outcome]:
    """Return the outcomes of candidates that are skipped as too slow by Inductor's own timing.

    A library's call is never skipped. Inductor compiles all candidates at once, and measures in
    subprocesses what may crash.
    """
    hook = Choosing(watches=True)
    with choosing(hook):
        isolation = {"autotune_in_subproc": inputs[0].is_cuda}
        options = OPTIONS | ANEW | QUIETLY | isolation
        compiling.start_graph(problem, inputs, options, waits=True)
    logs = [h.times for h in hook.heard if h.problem == problem]
    milliseconds = {encode(choice): microseconds(ms) for times in logs for choice, ms in times}
    times = {key: time for key, time in milliseconds.items() if time is not None}
    limit = min(times.values(), default=math.inf) * HOPELESS
    entered = sorted((t, k) for k, t in times.items() if t <= limit)[:FINALISTS]
    finalists = {key for _, key in entered}
    return [
        Outcome(choice, reported=times[key])
        for choice in offer.choices
        if (key := encode(choice)) in times and key not in finalists and choice.kind != "library"
    ]


def _device(problem: Problem) -> torch.device:
    """Return the device of this machine that the problem is for.

    Raises:
        ValueError: no device has the problem's architecture.
    """
    for kind in ("cuda", "xpu", "cpu"):
        if kind != "cpu" and not getattr(torch, kind).is_available():
            continue
        if str(target.current(kind)) == problem.arch:
            return torch.device(kind)
    raise ValueError(f"no device here is {problem.arch}")


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    child.serve(lambda say: Tuner(say).tune)


if __name__ == "__main__":
    main()

"""The process that measures: `python -m ipex_inductor.lowerings.tuner`, see `autotune.child`.

A problem's candidates are whole compiled graphs, op and epilogue, that differ in the one choice.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ipex_inductor import compat, lowerings, target
from ipex_inductor.autotune import child, clocks, measure
from ipex_inductor.autotune.cost import Model
from ipex_inductor.autotune.measure import Candidate, Judge, Round, Run, Runner
from ipex_inductor.autotune.ranges import points
from ipex_inductor.autotune.record import Choice, Outcome, Problem, Record, Timing, encode
from ipex_inductor.autotune.select import cost_model
from ipex_inductor.autotune.told import microseconds
from ipex_inductor.lowerings import library, peaks, resources, settings
from ipex_inductor.lowerings.calls import Call
from ipex_inductor.lowerings.listed import Choosing, Offer, choosing
from ipex_inductor.lowerings.provenance import provenance_of
from ipex_inductor.lowerings.workload import function_of, inputs_of, mark, widened

# What makes Inductor list its templates, and time nothing.
OPTIONS: dict[str, Any] = {"max_autotune": True, "shape_padding": False}
# What a graph with an op of ours is compiled by: templates may change more than the choice does.
USUALLY: dict[str, Any] = {"shape_padding": False}
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
        trials = []
        for point in points(problem):
            self._say.doing(NOBODY)
            trials.append(_trial(point, device))
        self._say.doing(NOBODY)
        default, offer = _offer(problem, trials[0].inputs)
        self._say.choices(offer.choices)
        outcomes = [o for o in out if o.choice in offer.choices]
        passed, order = self._narrowed(problem, offer, trials, device)
        outcomes += [o for o in passed if o.choice not in [known.choice for known in outcomes]]
        known = {encode(o.choice) for o in outcomes}
        candidates: list[tuple[int, Candidate, float]] = []
        for i in order:
            choice = offer.choices[i]
            if encode(choice) in known or (len(candidates) > 1 and time.monotonic() > deadline):
                continue
            self._say.doing(i)
            run = default if choice == offer.taken else None
            found = self._candidate(problem, choice, trials, run)
            if isinstance(found, Outcome):
                outcomes.append(found)
            else:
                candidates.append((i, *found))
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
        inductors = problem.op not in library.CALLS  # who lists many; ours are few
        if inductors and len(offer.choices) > FINALISTS and device.type in PRUNED:
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

    def _candidate(
        self, problem: Problem, choice: Choice, trials: Sequence[Trial], run: Run | None
    ) -> Outcome | tuple[Candidate, float]:
        """Compiled, unless `run` is it, and found right, with its error."""
        try:
            with resources.of_loaded() as takes:
                run = run or compiled(problem, choice, trials[0].inputs)
            candidate = Candidate(choice, run, takes)
        except measure.FATAL:
            raise
        except Exception as error:
            return Outcome(choice, reason=f"it does not compile: {measure.first_line(error)}")
        found = _verified(candidate, trials)
        return found if isinstance(found, Outcome) else (candidate, found)

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
        buffers, clock, seeds = _buffers(trials, device), clocks.clock_of(device), itertools.count()

        def place() -> Callable[[Run], Round]:
            here = clocks.moved(buffers, next(seeds))
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
    count = clocks.buffers_against_caches(device, size)
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


def compiled(problem: Problem, choice: Choice, inputs: Sequence[Tensor]) -> Run:
    """The problem's graph with that choice. Raises `ValueError` if it is not to be had."""
    if problem.op in library.CALLS:
        return _called(problem, library.call_of(problem, choice), inputs)
    run, offers = _lowered(problem, inputs, {encode(problem): choice})
    offer = offers.get(encode(problem))
    if offer is None or offer.taken != choice:
        raise ValueError("Inductor does not offer it any more")
    return run


def _offer(problem: Problem, inputs: Sequence[Tensor]) -> tuple[Run, Offer]:
    """The graph with the choice that is usual, and what there is to choose from."""
    if problem.op in library.CALLS:
        calls = library.calls(problem)
        if len(calls) < 2:
            raise ValueError("nothing but Inductor's own may compute it")
        choices = tuple(call.choice for call in calls)
        return _called(problem, calls[0], inputs), Offer(problem, choices, choices[0])
    run, offers = _lowered(problem, inputs, {})
    offer = offers.get(encode(problem))
    if offer is None:
        others = ", ".join(_named(o.problem) for o in offers.values()) or "nothing to choose from"
        raise ValueError(f"here it is lowered as {others}")
    return run, offer


def _called(problem: Problem, call: Call, inputs: Sequence[Tensor]) -> Run:
    """The graph with the op computed by `call`, and what that leaves of the epilogue by Inductor.

    Without max-autotune, under which a convolution of one pixel is a product to Inductor.
    """
    lowerings.register()
    if call.arrange is None:
        return _lowered(problem, inputs, {}, USUALLY, function_of(problem, call.body))[0]
    arrange = function_of(replace(problem, epilogue=""), call.arrange)

    def function(weight: Tensor, *operands: Tensor) -> Tensor:
        return function_of(problem, functools.partial(call.body, weight))(*operands)

    known = Arranged(arrange)
    run, _ = _lowered(problem, [known(inputs), *inputs], {}, USUALLY, function)
    return lambda operands: run([known(operands), *operands])


class Arranged:
    """Weights as a call takes them, which the graphs of models have from a prologue: made once."""

    def __init__(self, arrange: Callable[..., Tensor]) -> None:
        self._arrange = arrange
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, operands: Sequence[Tensor]) -> Tensor:
        """What `arrange` makes of `operands`, whose second is the weight."""
        weight = operands[1]
        version, made = self._known.get(weight, (None, None))
        if version != weight._version:
            with torch.no_grad():
                made = self._arrange(*operands)
            self._known[weight] = weight._version, made
        assert isinstance(made, Tensor)
        return made


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
        _compiled(
            problem, inputs, OPTIONS | ANEW | QUIETLY | {"autotune_in_subproc": inputs[0].is_cuda}
        )
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


def _named(problem: Problem) -> str:
    shapes = " ".join(f"{o.dtype}{list(o.shape)}{list(o.stride)}" for o in problem.operands)
    return f"{problem.op} {shapes}"


def _lowered(
    problem: Problem,
    inputs: Sequence[Tensor],
    selected: dict[bytes, Choice],
    options: dict[str, Any] = OPTIONS,
    function: Callable[..., Tensor] | None = None,
) -> tuple[Run, dict[bytes, Offer]]:
    """The compiled graph of the problem, and what was offered for the ops in it."""
    now = Choosing(selected)
    with choosing(now):
        run = _compiled(problem, inputs, options, function)

    def call(operands: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            result: Tensor = run(*operands)
        return result

    return call, now.offers


def _compiled(
    problem: Problem,
    inputs: Sequence[Tensor],
    options: dict[str, Any],
    function: Callable[..., Tensor] | None = None,
) -> Callable[..., Tensor]:
    with torch.no_grad(), compat.graph_caches_off():
        run = (
            _dynamic(problem, inputs, options)
            if problem.symbols
            else _static(function or function_of(problem), inputs, options)
        )
        run(*inputs)  # AOT autograd compiles at the first call
    return run


def _static(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Tensor]:
    """Without Dynamo, whose guards take as long as a small product."""
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(function)(*inputs)
    run: Any = compile_fx(gm, list(inputs), config_patches=options)
    return cast(Callable[..., Tensor], run)


def _dynamic(
    problem: Problem, inputs: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Tensor]:
    mark(problem, inputs)
    # What Dynamo compiles for one choice must not be taken for another, nor be compiled anew.
    torch._dynamo.config.error_on_recompile = True
    function = function_of(problem)

    def call(*operands: Tensor) -> Tensor:
        return function(*operands)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, fullgraph=True, options=options)


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

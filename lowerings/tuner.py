"""The process that measures: `python -m ipex_inductor.lowerings.tuner`, see `autotune.child`.

A problem's candidates are whole compiled graphs, op and epilogue, that differ in the one choice.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import compat, target
from ipex_inductor.autotune import child, clocks, measure
from ipex_inductor.autotune.measure import Candidate, Judge, Run, Runner
from ipex_inductor.autotune.record import Choice, Outcome, Problem, Record, encode
from ipex_inductor.lowerings import peaks, settings
from ipex_inductor.lowerings.listed import Choosing, Offer, choosing
from ipex_inductor.lowerings.provenance import provenance_of
from ipex_inductor.lowerings.workload import function_of, inputs_of, widened

# What makes Inductor list its templates, and time nothing.
OPTIONS = {"max_autotune": True, "shape_padding": False}


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
        inputs = inputs_of(problem, device, seed=0)
        judge = _judge(problem, inputs)
        default, offer = _offer(problem, inputs)
        self._say.choices(offer.choices)
        known = {encode(o.choice): o for o in out}
        outcomes = [o for o in out if o.choice in offer.choices]
        candidates = []
        for i, choice in enumerate(offer.choices):
            if encode(choice) in known:
                continue
            self._say.doing(i)
            run = default if choice == offer.taken else None
            found = self._candidate(problem, choice, inputs, judge, run)
            if isinstance(found, Outcome):
                outcomes.append(found)
            else:
                candidates.append((i, *found))
        outcomes += self._raced(problem, candidates, judge, deadline)
        order = {encode(c): i for i, c in enumerate(offer.choices)}
        outcomes.sort(key=lambda o: order[encode(o.choice)])
        return Record(problem, tuple(outcomes), provenance_of(device))

    def _candidate(
        self,
        problem: Problem,
        choice: Choice,
        inputs: Sequence[Tensor],
        judge: Judge,
        run: Run | None,
    ) -> Outcome | tuple[Candidate, float]:
        """Compiled, unless `run` is it, and found right, with its error."""
        try:
            candidate = Candidate(choice, run or compiled(problem, choice, inputs))
        except Exception as error:
            return Outcome(choice, reason=f"it does not compile: {measure.first_line(error)}")
        found = measure.verified(candidate, judge, inputs)
        return found if isinstance(found, Outcome) else (candidate, found)

    def _raced(
        self,
        problem: Problem,
        candidates: Sequence[tuple[int, Candidate, float]],
        judge: Judge,
        deadline: float,
    ) -> list[Outcome]:
        """The outcomes of what was right, after the race and a second look at its results."""
        device = _device(problem)
        first = inputs_of(problem, device, seed=0)
        size = sum(t.untyped_storage().nbytes() for t in first)
        count = clocks.buffers_against_caches(device, size)
        buffers = [first, *(inputs_of(problem, device, seed) for seed in range(1, count))]
        clock = clocks.clock_of(device)
        runners, numbers, failed = [], {}, []
        for i, candidate, error in candidates:
            self._say.doing(i)
            try:
                runner = Runner(candidate, clock.prepare(candidate.run, buffers), error)
            except Exception as refused:
                reason = f"it cannot be timed: {measure.first_line(refused)}"
                failed.append(Outcome(candidate.choice, reason=reason))
                continue
            runners.append(runner)
            numbers[id(runner)] = i
        if runners:
            measure.race(runners, deadline=deadline, say=lambda r: self._say.doing(numbers[id(r)]))
        fresh = inputs_of(problem, device, seed=0)  # who wrote its inputs did so to itself alone
        return failed + [self._outcome(problem, r, judge, fresh) for r in runners]

    def _outcome(
        self, problem: Problem, runner: Runner, judge: Judge, inputs: Sequence[Tensor]
    ) -> Outcome:
        again = measure.verified(runner.candidate, judge, inputs)
        if isinstance(again, Outcome):
            return again  # right at first, and not any more
        timing = runner.timing()
        bandwidth, rate = peaks.shares(problem, timing.p50)
        return Outcome(
            runner.candidate.choice,
            timing,
            error=max(again, runner.error),
            tolerance=judge.tolerance,
            bandwidth=bandwidth,
            rate=rate,
        )


def compiled(problem: Problem, choice: Choice, inputs: Sequence[Tensor]) -> Run:
    """The problem's graph with that choice. Raises `ValueError` if it is not to be had."""
    run, offers = _lowered(problem, inputs, {encode(problem): choice})
    offer = offers.get(encode(problem))
    if offer is None or offer.taken != choice:
        raise ValueError("Inductor does not offer it any more")
    return run


def _offer(problem: Problem, inputs: Sequence[Tensor]) -> tuple[Run, Offer]:
    """The graph with the choice that is usual, and what there is to choose from."""
    run, offers = _lowered(problem, inputs, {})
    offer = offers.get(encode(problem))
    if offer is None:
        others = ", ".join(_named(o.problem) for o in offers.values()) or "nothing to choose from"
        raise ValueError(f"here it is lowered as {others}")
    return run, offer


def _named(problem: Problem) -> str:
    shapes = " ".join(f"{o.dtype}{list(o.shape)}{list(o.stride)}" for o in problem.operands)
    return f"{problem.op} {shapes}"


def _lowered(
    problem: Problem, inputs: Sequence[Tensor], selected: dict[bytes, Choice]
) -> tuple[Run, dict[bytes, Offer]]:
    """The compiled graph of the problem, and what was offered for the ops in it."""
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    now = Choosing(selected)
    with torch.no_grad(), compat.graph_caches_off(), choosing(now):
        gm = make_fx(function_of(problem))(*inputs)
        run: Any = compile_fx(gm, list(inputs), config_patches=OPTIONS)
        run(*inputs)  # AOT autograd compiles at the first call

    def call(given: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            result: Tensor = run(*given)
        return result

    return call, now.offers


def _judge(problem: Problem, inputs: Sequence[Tensor]) -> Judge:
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    with torch.no_grad():
        return Judge(function_of(widened(problem))(*wide), function_of(problem)(*inputs))


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

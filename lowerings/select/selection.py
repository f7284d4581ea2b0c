"""Kernel selection for a graph, completed before the graph is compiled for use.

The problems of a graph are learned by lowering it once and are stored under the graph's digest. In
later processes the selections are therefore known before Inductor makes its cache key, and are part
of that key. A stored list that is wrong costs only speed: a problem without a selection gets the
library's kernel.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from ipex_inductor.aot_cache import cache_root
from ipex_inductor.autotune import own
from ipex_inductor.autotune.child import SPENT, Child, Refused, Tuned
from ipex_inductor.autotune.database import Shard
from ipex_inductor.autotune.foreign.told import microseconds
from ipex_inductor.autotune.record import Outcome, Problem, Record, encode
from ipex_inductor.autotune.select import (
    Selection,
    failed_choices,
    guesser,
    lookup,
    nearest,
    select_by_model,
    select_by_neighbors,
    select_by_stand_in,
    table_of,
)
from ipex_inductor.lowerings.problem.provenance import provenance_of
from ipex_inductor.lowerings.problem.selector_hook import InductorTimes, Offer, arch_of
from ipex_inductor.lowerings.select import competing_templates, peaks, prefilter
from ipex_inductor.reporting import decisions
from ipex_inductor.target import device as target

# Parts of reasons that may not apply another time.
PASSING = (SPENT, "OutOfMemoryError", "want of memory")
MODELLED = ("cuda", "xpu")  # device types that may have a cost model
JOINED = tuple(f"ipex.conv_{name}.default" for name in ("pool", "preactivated", "shortcut"))
COMMAND = (sys.executable, "-P", "-m", "ipex_inductor.lowerings.tune.tuner")
log = decisions.log


@dataclass(frozen=True)
class Policy:
    """Define which records are used and whether new ones may be measured.

    Attributes:
        database: folder of the records; None if there is none.
        may_time: whether missing records may be measured.
        budget: seconds of timing for one graph.
        tables: whether packaged tables are consulted, for which the graph is lowered once more;
            most graphs are in none.
        guesses: whether the cost model selects kernels for problems without measurements.
    """

    database: Path | None
    may_time: bool
    budget: float
    tables: bool = False
    guesses: bool = True

    def records(self, devices: Iterable[torch.device]) -> bool:
        """Return whether records of graphs on `devices` exist or may be measured."""
        has_database = self.database is not None and (self.may_time or self.database.exists())
        tables = ((arch, table_of(arch)) for arch in map(arch_of, devices) if self.tables)
        return has_database or any(
            table and (table == arch or self.guesses) for arch, table in tables
        )


def settle(
    policy: Policy,
    graph: str,
    learn: Callable[[], Iterable[Offer]],
    say: Callable[[str, str], None],
) -> dict[bytes, Selection]:
    """Return the selections for a graph, measuring kernels if the policy allows it.

    Args:
        policy: which records to use and whether to measure.
        graph: digest of the graph.
        learn: lowers the graph and returns the offers that Inductor made.
        say: receives a subject and a reason for each problem that could not be measured or that the
            model makes no selection for.
    """
    offers = _load_offers(graph)
    if offers is None:
        offers = {encode(offer.problem): offer for offer in learn()}
        _store_offers(graph, offers)
    selections = lookup(offers, policy.database)
    if policy.may_time and policy.database is not None and offers.keys() - selections.keys():
        missing = [offer for key, offer in offers.items() if key not in selections]
        problems = [offer.problem for offer in sorted(missing, key=_measuring_order)]
        unusable = _measure(problems, policy.database, policy.budget, say)
        # A problem that cannot be measured on this machine is not tried again in each process.
        offers = {key: offer for key, offer in offers.items() if key not in unusable}
        _store_offers(graph, offers)
        selections = lookup(offers, policy.database)
    if policy.guesses:
        for find_selections in (nearest, select_by_stand_in, select_by_neighbors):
            unselected = {
                key: offer.choices for key, offer in offers.items() if key not in selections
            }
            selections |= find_selections(unselected, policy.database)
        unknown = {k: o for k, o in offers.items() if k not in selections and _has_template(o)}
        selections |= _predict_selections(unknown, policy, say)
    return competing_templates.prefer_templates(
        selections, {key: offer.choices for key, offer in offers.items()}
    )


def _measuring_order(offer: Offer) -> tuple[bool, bool, float]:
    """Return the sort key of the order of measuring: what takes longest is measured first.

    The budget may be spent before all problems are measured. Torch's own ops come last: on an H200
    ResNet-50's 14 took 85 s and did not change its selections. Ops that join several ops come
    before them, as each of their parts is measured as well.
    """
    problem = offer.problem
    ours = problem.op.startswith("ipex.")
    return not ours, problem.op in JOINED, -offer.times * peaks.floor(problem)


def _has_template(offer: Offer) -> bool:
    """Return whether Inductor lists a template: the cost model knows no other candidates."""
    return any(choice.name.startswith("inductor.") for choice in offer.choices)


def _predict_selections(
    offers: Mapping[bytes, Offer], policy: Policy, say: Callable[[str, str], None]
) -> dict[bytes, Selection]:
    """Return the cost model's selections for problems without measurements.

    Args:
        offers: offers by encoded problem.
        policy: policy whose database has the candidates that failed.
        say: receives the reasons for which the model makes no selection.
    """
    failures = failed_choices(offers, policy.database) if offers else {}
    selections: dict[bytes, Selection] = {}
    reasons: dict[tuple[str, str], None] = {}
    for key, offer in offers.items():
        choices = [c for c in offer.choices if encode(c) not in failures.get(key, ())]
        guess = select_by_model(offer.problem, choices, offer.taken)
        if isinstance(guess, Selection):
            selections[key] = guess
        elif guess:
            reasons[offer.problem.op, guess] = None
    for op, reason in reasons:
        say(f"a template for {op}", f"the library's: {reason}")
    return selections


def _measure(
    problems: Sequence[Problem], database: Path, budget: float, say: Callable[[str, str], None]
) -> set[bytes]:
    """Measure problems, store the records, and return encoded problems without a usable kernel.

    Args:
        problems: problems to measure, in order.
        database: folder that the records are appended to.
        budget: seconds for all of them.
        say: receives a subject and a reason for each problem without a usable kernel.
    """
    unusable = set()
    try:
        for problem, result in store_results(tune_locally(problems, budget), database):
            usable = isinstance(result, Record) and any(o.timing for o in result.outcomes)
            if not usable:
                reason = result if isinstance(result, str) else "no choice gives what it should"
                say(f"autotune of {problem.op}", reason)
                # A problem skipped for lack of time or memory may be measurable another time.
                unusable |= set() if any(map(reason.__contains__, PASSING)) else {encode(problem)}
    except OSError as error:
        say("autotune", f"measuring stopped: {error}")
    return unusable


def database_of(option: str) -> Path | None:
    """Return the folder that the option names, or the default folder if the option is empty.

    The result is None if the default folder is writable by other users.
    """
    if option:
        return Path(os.path.expanduser(option))
    return own.default_folder() if own.is_default_trusted() else None


def may_choose(policy: Policy, gm: torch.fx.GraphModule, devices: Collection[torch.device]) -> bool:
    """Return whether kernels may have to be selected for this Dynamo graph."""
    accelerators = [device for device in devices if device.type != "cpu"]
    if policy.records(devices):
        return bool(accelerators) or prefilter.multiplies_batches(gm)
    if not policy.guesses:
        return False
    archs = {str(target.current(device)) for device in accelerators if device.type in MODELLED}
    return any(prefilter.may_guess(gm, model) for model in map(guesser, sorted(archs)) if model)


def store_results(measured: Iterable[Tuned], database: Path) -> Iterator[Tuned]:
    """Yield the results of `measured`, writing each record to disk first and logging failures."""
    shard = Shard(database)
    try:
        for problem, result in measured:
            if isinstance(result, Record):
                _say_failures(result)
                shard.append(result)
            else:
                log.warning("autotune: %s: %s", problem.op, result)
            yield problem, result
    finally:
        shard.close()


def tune_locally(
    problems: Sequence[Problem], budget: float, command: Sequence[str] = COMMAND
) -> Iterator[Tuned]:
    """Measure `problems` on this machine, one after the other, in at most `budget` seconds."""
    deadline = time.monotonic() + budget
    with Child(command) as child:
        for problem in problems:
            remaining = deadline - time.monotonic()
            try:
                yield problem, child.tune(problem, remaining) if remaining > 0 else SPENT
            except Refused as refused:
                yield problem, str(refused)


def store_inductor_times(heard: Iterable[InductorTimes], database: Path) -> None:
    """Store times measured by Inductor, marked as such: selection does not trust them."""
    shard = Shard(database)
    try:
        for timing in heard:
            times = ((choice, microseconds(ms)) for choice, ms in timing.times)
            outcomes = tuple(Outcome(c, reported=time) for c, time in times if time is not None)
            if outcomes:
                by = provenance_of(timing.device, source="inductor")
                shard.append(Record(timing.problem, outcomes, by))
    finally:
        shard.close()


def _say_failures(record: Record) -> None:
    for outcome in record.outcomes:
        if outcome.reason:
            log.warning(
                "autotune: %s of %s is out: %s",
                outcome.choice.name,
                record.problem.op,
                outcome.reason,
            )


def _folder() -> Path:
    """Return the folder that has the offers of each graph."""
    return cache_root.home() / "graphs"


def _load_offers(graph: str) -> dict[bytes, Offer] | None:
    """Return the stored offers of a graph, by encoded problem; None if there are none."""
    file = _folder() / f"{graph}.json"
    if not cache_root.state(_folder()).usable or not file.exists():
        return None
    try:
        offers = msgspec.json.decode(file.read_bytes(), type=list[Offer])
    except (OSError, msgspec.MsgspecError):
        return None
    return {encode(offer.problem): offer for offer in offers}


def _store_offers(graph: str, offers: Mapping[bytes, Offer]) -> None:
    """Store the offers of a graph atomically.

    Without a usable folder nothing is stored, and the next process learns the offers again.
    """
    if not cache_root.ensure(_folder()).usable:
        return
    temporary = _folder() / f".{graph}.{secrets.token_hex(8)}"
    try:
        temporary.write_bytes(encode([*offers.values()]))
        temporary.replace(_folder() / f"{graph}.json")
    except OSError as error:
        log.info("autotune: what this graph needs is not remembered: %s", error)
        temporary.unlink(missing_ok=True)

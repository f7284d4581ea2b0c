"""Which kernels a graph gets, settled before anything of it is compiled for use.

The problems of a graph are learned by lowering it once, and remembered by what the graph is; so
in later processes the selections are known before Inductor makes its cache key, and are part of it.
A list that is remembered wrongly costs only speed: what was not settled gets the library's kernel.
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
from ipex_inductor.autotune.record import Outcome, Problem, Record, encode
from ipex_inductor.autotune.select import (
    Selection,
    derived,
    failed,
    guessed,
    guesser,
    lookup,
    nearest,
    neighboring,
    table_of,
)
from ipex_inductor.autotune.told import microseconds
from ipex_inductor.lowerings.problem.provenance import provenance_of
from ipex_inductor.lowerings.problem.selector_hook import Heard, Offer, arch_of
from ipex_inductor.lowerings.select import competing_templates, peaks, prefilter
from ipex_inductor.reporting import decisions
from ipex_inductor.target import device as target

PASSING = (SPENT, "OutOfMemoryError", "want of memory")  # reasons that may not last
MODELLED = ("cuda", "xpu")  # kinds of devices that there may be a cost model of
JOINED = tuple(f"ipex.conv_{name}.default" for name in ("pool", "preactivated", "shortcut"))
COMMAND = (sys.executable, "-P", "-m", "ipex_inductor.lowerings.tune.tuner")
log = decisions.log


@dataclass(frozen=True)
class Policy:
    """Where records are and whether more may be made: seconds of timing for one graph.

    To look into `tables` of the package a graph is lowered once more; most graphs are in none.
    Whether a model `guesses` what nobody measured.
    """

    database: Path | None
    may_time: bool
    budget: float
    tables: bool = False
    guesses: bool = True

    def records(self, devices: Iterable[torch.device]) -> bool:
        """Whether there are records, or may be, of graphs on `devices`."""
        there = self.database is not None and (self.may_time or self.database.exists())
        tables = ((arch, table_of(arch)) for arch in map(arch_of, devices) if self.tables)
        return there or any(table and (table == arch or self.guesses) for arch, table in tables)


def settle(
    policy: Policy,
    graph: str,
    learn: Callable[[], Iterable[Offer]],
    say: Callable[[str, str], None],
) -> dict[bytes, Selection]:
    """The selections for the graph with that digest; `learn` lowers it to see what it is offered.

    `say` hears what could not be measured and what the model has no say in, and why.
    """
    offers = _remembered(graph)
    if offers is None:
        offers = {encode(offer.problem): offer for offer in learn()}
        _remember(graph, offers)
    found = lookup(offers, policy.database)
    if policy.may_time and policy.database is not None and offers.keys() - found.keys():
        missing = [offer for key, offer in offers.items() if key not in found]
        problems = [offer.problem for offer in sorted(missing, key=_turn)]
        out = _measure(problems, policy.database, policy.budget, say)
        # What cannot be measured here is not tried again by every process.
        offers = {key: offer for key, offer in offers.items() if key not in out}
        _remember(graph, offers)
        found = lookup(offers, policy.database)
    if policy.guesses:
        for others_say in (nearest, derived, neighboring):
            missed = {key: offer.choices for key, offer in offers.items() if key not in found}
            found |= others_say(missed, policy.database)
        unknown = {k: o for k, o in offers.items() if k not in found and _has_template(o)}
        found |= _guessed(unknown, policy, say)
    return competing_templates.settled(found, {key: offer.choices for key, offer in offers.items()})


def _turn(offer: Offer) -> tuple[bool, bool, float]:
    """What is measured first, should the time be up before all is: what takes longest.

    Last what is torch's own: on an H200 ResNet-50's 14 took 85 s and changed nothing of what it
    got. Before that what joins several ops, each of which is measured as well.
    """
    problem = offer.problem
    ours = problem.op.startswith("ipex.")
    return not ours, problem.op in JOINED, -offer.times * peaks.floor(problem)


def _has_template(offer: Offer) -> bool:
    """Whether Inductor lists one, as the model knows no others."""
    return any(choice.name.startswith("inductor.") for choice in offer.choices)


def _guessed(
    offers: Mapping[bytes, Offer], policy: Policy, say: Callable[[str, str], None]
) -> dict[bytes, Selection]:
    """What the cost model says of what nobody measured; `say` hears why it says nothing."""
    out = failed(offers, policy.database) if offers else {}
    found: dict[bytes, Selection] = {}
    reasons: dict[tuple[str, str], None] = {}
    for key, offer in offers.items():
        choices = [c for c in offer.choices if encode(c) not in out.get(key, ())]
        guess = guessed(offer.problem, choices, offer.taken)
        if isinstance(guess, Selection):
            found[key] = guess
        elif guess:
            reasons[offer.problem.op, guess] = None
    for op, reason in reasons:
        say(f"a template for {op}", f"the library's: {reason}")
    return found


def _measure(
    problems: Sequence[Problem], database: Path, budget: float, say: Callable[[str, str], None]
) -> set[bytes]:
    """Keep a record of each, and give those of which nothing can be used; `say` hears why."""
    out = set()
    try:
        for problem, told in tuned(here(problems, budget), database):
            works = isinstance(told, Record) and any(o.timing for o in told.outcomes)
            if not works:
                reason = told if isinstance(told, str) else "no choice gives what it should"
                say(f"autotune of {problem.op}", reason)
                # What a lack of time or memory kept from being measured may be another time.
                out |= set() if any(map(reason.__contains__, PASSING)) else {encode(problem)}
    except OSError as error:
        say("autotune", f"measuring stopped: {error}")
    return out


def database_of(option: str) -> Path | None:
    """The folder of that name; else our own, None if others can write that."""
    if option:
        return Path(os.path.expanduser(option))
    return own.default_folder() if own.trusted() else None


def may_choose(policy: Policy, gm: torch.fx.GraphModule, devices: Collection[torch.device]) -> bool:
    """Whether there can be anything to settle in this Dynamo graph."""
    others = [device for device in devices if device.type != "cpu"]
    if policy.records(devices):
        return bool(others) or prefilter.multiplies_batches(gm)
    if not policy.guesses:
        return False
    archs = {str(target.current(device)) for device in others if device.type in MODELLED}
    return any(prefilter.may_guess(gm, known) for known in map(guesser, sorted(archs)) if known)


def tuned(measured: Iterable[Tuned], database: Path) -> Iterator[Tuned]:
    """The same; each record is on the disk before it comes, and what is out is said in the log."""
    shard = Shard(database)
    try:
        for problem, told in measured:
            if isinstance(told, Record):
                _say_failures(told)
                shard.append(told)
            else:
                log.warning("autotune: %s: %s", problem.op, told)
            yield problem, told
    finally:
        shard.close()


def here(
    problems: Sequence[Problem], budget: float, command: Sequence[str] = COMMAND
) -> Iterator[Tuned]:
    """Measure `problems` on this machine, one after the other, in so many seconds."""
    deadline = time.monotonic() + budget
    with Child(command) as child:
        for problem in problems:
            left = deadline - time.monotonic()
            try:
                yield problem, child.tune(problem, left) if left > 0 else SPENT
            except Refused as refused:
                yield problem, str(refused)


def keep_heard(heard: Iterable[Heard], database: Path) -> None:
    """What Inductor timed itself, as records that say so: selection does not trust them."""
    shard = Shard(database)
    try:
        for each in heard:
            times = ((choice, microseconds(ms)) for choice, ms in each.times)
            outcomes = tuple(Outcome(c, reported=time) for c, time in times if time is not None)
            if outcomes:
                by = provenance_of(each.device, source="inductor")
                shard.append(Record(each.problem, outcomes, by))
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
    return cache_root.home() / "graphs"


def _remembered(graph: str) -> dict[bytes, Offer] | None:
    """What this graph was offered when it was lowered, None if that is not known."""
    file = _folder() / f"{graph}.json"
    if not cache_root.state(_folder()).usable or not file.exists():
        return None
    try:
        offers = msgspec.json.decode(file.read_bytes(), type=list[Offer])
    except (OSError, msgspec.MsgspecError):
        return None
    return {encode(offer.problem): offer for offer in offers}


def _remember(graph: str, offers: Mapping[bytes, Offer]) -> None:
    """Whole or not at all; without a folder of our own they are learned anew next time."""
    if not cache_root.ensure(_folder()).usable:
        return
    part = _folder() / f".{graph}.{secrets.token_hex(8)}"
    try:
        part.write_bytes(encode([*offers.values()]))
        part.replace(_folder() / f"{graph}.json")
    except OSError as error:
        log.info("autotune: what this graph needs is not remembered: %s", error)
        part.unlink(missing_ok=True)

"""The kernel cache's entries of compiled graphs: the files that torch needs so as to build nothing.

A key here only finds the entry. Whether what lies in it fits is for torch to say, whose own keys
are in the names of the files; if they do not, torch builds, and the entry gets the new files too.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ipex_inductor.aot_cache import default_store, glibc, graph_text, single_flight, use, workroom
from ipex_inductor.aot_cache.comparing import Compared, compare
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.key import Key, nearest
from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.aot_cache.store import Store

log = logging.getLogger("ipex_inductor")

KIND, CHECKS = "graph", "vector checks"
NOTHING = "nothing to compare"
IN_NONE, MOST_ALIKE = "it is in no entry", "; the graph most like it differs first in: "
COMPARED = 30  # entries whose text is read for a graph that is in none

compared: list[Compared] = []  # by this process, under `IPEX_AOT_VERIFY`


@dataclass
class GraphFiles:
    """The files of one graph, in a folder that torch works in. Raises `OSError` if there is none.

    `outcome`: "hit" if torch built nothing, "miss" if there was no entry, "outdated" if torch built
    something though there was one; "same", "different" or "nothing to compare" if it was made to
    (`IPEX_AOT_VERIFY`).
    `reason` says why, or what was found.
    """

    key: Key | None  # None: nothing is to be read or kept
    keeps: bool = True  # False: what a run would find is told, and the entry stays as it is
    text: str = ""  # of the graph, which tells what sets another one apart
    others: tuple[Key, ...] = ()  # under which it could have been as well
    folder: Path = field(init=False)
    outcome: str = field(init=False, default="miss")
    reason: str = field(init=False, default="nothing is to be kept")
    _begun: bool = field(init=False, default=False)
    _waited: str = field(init=False, default="")
    _known: frozenset[str] = field(init=False, default=frozenset())
    _kept: Mapping[str, bytes] | None = field(init=False, default=None)  # to be compared with only

    def __post_init__(self) -> None:
        room = workroom.room()
        own = room / self.key.digest[:32] if self.key else None
        self.folder = own if own and self.keeps else room / os.urandom(16).hex()
        if own and own.is_dir():
            self.outcome, self.reason = "hit", "compiled before by this process"
            self.folder.mkdir(mode=0o700, exist_ok=self.keeps)
            self._known = frozenset(workroom.files_in(self.folder))
            return
        store = default_store.store()
        found = store.find(self.key) if self.key and store else None
        if found:
            try:
                self._use(*found)
            except (OSError, ValueError) as error:
                say(f"a graph is compiled anew: {error}")
                shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def alone(self, before_waiting: Callable[[], None] | None) -> Iterator[None]:
        """Inside, torch compiles what is missing, if it can be in this process alone.

        What another one compiles at the same time is waited for, and then lies in the folder; not
        if `before_waiting` is None. Said again for a backward, of which an entry knows nothing
        until somebody has needed it.
        """
        first, self._begun = not self._begun, True
        found = first and self.outcome == "hit"
        part = "" if first else "-backward"
        with nullcontext() if found or not before_waiting else self._lock(part, before_waiting):
            if first and self.outcome == "miss":
                self._say_missed()
            yield

    def keep(self) -> None:
        """Put what torch has built into the entry. Never raises for what the disk says."""
        try:
            workroom.complete(self.folder)
            new = frozenset(workroom.files_in(self.folder)) - self._known
            if not new:
                return
            if self._kept is not None and self.key:
                self._compare(self.key.digest, self._kept)
                return
            if not self.keeps:
                return
            if self.outcome == "hit":
                self.outcome, self.reason = "outdated", f"torch made {len(new)} files anew"
                log.info("kernel cache: an entry is outdated: %s", self.reason)
            store = default_store.store()
            if self.key and store:
                blob = workroom.packed(self.folder)
                self._known |= new
                why = self.reason.partition(MOST_ALIKE)[0]  # a line of another graph stays here
                meta = {"files": len(self._known), "why": why, **graph_text.keeping(self.text)}
                store.put(self.key, meta, blob)
        except OSError as error:
            say(f"a graph is not kept: {error.strerror}")

    def _use(self, entry: Entry, origin: str) -> None:
        if use.recompiles():
            self._kept = workroom.unpacked(entry.blob)
            self.outcome, self.reason = NOTHING, "torch generated no source"
            return
        self._known = workroom.unpack(entry.blob, self.folder, _is_too_new)
        files = f"{len(self._known)} files, {len(entry.blob) / (1 << 20):.1f} MiB"
        self.outcome, self.reason = "hit", f"{files}, all verified, from {origin}"

    def _lock(self, part: str, before_waiting: Callable[[], None]) -> AbstractContextManager[None]:
        store = default_store.store()
        path = store.lock_path(self.key, part) if self.key and self.keeps and store else None
        if path is None or use.recompiles():
            return nullcontext()
        return single_flight.alone(path, self._take, before_waiting)

    def _take(self, waited: float) -> bool:
        """Whether another process has put something new into the entry: then it is here too."""
        if waited:
            self._waited = f"waited {waited:.1f} s for who compiled it"
        store, before = default_store.store(), self._known
        found = store.come(self.key) if self.key and store else None
        try:
            if found and before:  # a backward's: what was found at first stays as it is
                self._known |= workroom.unpack(found[0].blob, self.folder, _is_too_new)
            elif found:
                self._use(*found)
                self.reason += f", {self._waited}" if waited else ""
        except (OSError, ValueError) as error:
            say(f"a graph is compiled anew: {error}")
        return len(self._known) > len(before)

    def _say_missed(self) -> None:
        store = default_store.store()
        if self.key and store:
            self.reason, texts = why_missed(store, self.key, *self.others)
            differs = graph_text.difference(self.text, texts) if self.text else ""
            alike = f"{MOST_ALIKE}{differs}" if differs else ""
            self.reason += (f"; {self._waited}, in vain" if self._waited else "") + alike
            log.info("kernel cache: a graph is compiled: %s", self.reason)

    def _compare(self, name: str, kept: Mapping[str, bytes]) -> None:
        built = {file: (self.folder / file).read_bytes() for file in workroom.files_in(self.folder)}
        found = compare(name, kept, built)
        if not found.sources:
            return
        self.outcome, self.reason = "different" if found.differing else "same", str(found)
        level = logging.WARNING if found.differing else logging.INFO
        log.log(level, "kernel cache: compiled again, %s", found)
        compared[:] = [*(each for each in compared if each.entry != name), found]


def why_missed(store: Store, *keys: Key) -> tuple[str, Iterator[str]]:
    """In the user's words: what sets the nearest entry of this graph apart from its keys.

    Of a graph that is in no entry, the texts of other graphs too, of those that were used last.
    """
    graph = _graph(keys[0].fields)
    alike: list[Mapping[str, Any]] = []
    others: list[bytes] = []
    for found in store.heads():
        if _graph(found.key) == graph:
            alike.append(found.key)
        elif found.key.get("kind") == KIND and len(others) < COMPARED:
            others.append(found.meta)
    told = [near for key in keys if (near := nearest(key, alike))]
    if not told:
        return IN_NONE, graph_text.kept(others)
    _, apart = min(told, key=lambda near: len(near[1]))
    return "; ".join(apart) or "its entry is not to be read", iter(())


class VectorChecks:
    """Which vector instructions compiler and CPU together can do, as tried once a machine."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._answers: dict[str, bool] | None = None
        self._kept = 0

    def answers(self) -> MutableMapping[str, bool]:
        """What is known; read when first asked for."""
        if self._answers is None:
            store = default_store.store()
            entry = store.get(self._key) if store else None
            found = entry.meta if entry else {}
            self._answers = {name: v for name, v in found.items() if type(v) is bool}
            self._kept = len(self._answers)
        return self._answers

    def keep(self) -> None:
        """Keep what was tried since."""
        store = default_store.store()
        if store and self._answers and len(self._answers) > self._kept:
            self._kept = len(self._answers)
            store.put(self._key, dict(self._answers), b"")


def _is_too_new(name: str, data: bytes) -> bool:
    """Whether a file is a library that cannot be loaded here; then torch or Triton builds it."""
    why = glibc.why_not(data) if name.endswith(".so") else ""
    if why:
        say(f"{name.rpartition('/')[2]} of an entry is built anew: {why}")
    return bool(why)


def _graph(fields: Mapping[str, Any]) -> object:
    with suppress(TypeError, ValueError):
        return dict(fields.get("problem", ())).get("graph")
    return None

"""Kernel cache entries of compiled graphs: the files that torch needs so as to build nothing.

A key here only finds the entry. Torch decides whether its files fit, by its own keys, which are
in the names of the files. If they do not fit, torch builds, and the new files are added to the
entry.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ipex_inductor.aot_cache import default_store, single_flight, use
from ipex_inductor.aot_cache.entry import Entry
from ipex_inductor.aot_cache.graph_files import glibc, graph_text, workroom
from ipex_inductor.aot_cache.graph_files.comparing import Compared, compare
from ipex_inductor.aot_cache.key import Key, nearest
from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.aot_cache.store import Store

log = logging.getLogger("ipex_inductor")

KIND, CHECKS = "graph", "vector checks"
NOTHING = "nothing to compare"
IN_NONE, MOST_ALIKE = "no entry has this graph", "; the most similar one differs first in: "
COMPARED = 30  # entries whose text is read for a graph without an entry

compared: list[Compared] = []  # by this process, under `IPEX_AOT_VERIFY`


@dataclass
class GraphFiles:
    """The files of one graph, in a folder that torch works in. Raises `OSError` without one.

    `outcome`: "hit" if torch built nothing, "miss" if there was no entry, "outdated" if torch built
    something although there was one; "same", "different" or "nothing to compare" if the graph was
    recompiled on purpose (`IPEX_AOT_VERIFY`).
    `reason`: why, or the result of the comparison.
    """

    key: Key | None  # None: neither read from nor write to the cache
    keeps: bool = True  # False: report what a run would find, and leave the entry unchanged
    text: str = ""  # of the graph, to explain how another one differs
    others: tuple[Key, ...] = ()  # alternative keys of this graph
    folder: Path = field(init=False)
    outcome: str = field(init=False, default="miss")
    reason: str = field(init=False, default="nothing is to be kept")
    _begun: bool = field(init=False, default=False)
    _waited: str = field(init=False, default="")
    _known: frozenset[str] = field(init=False, default=frozenset())
    _kept: Mapping[str, bytes] | None = field(init=False, default=None)  # used for comparison only

    def __post_init__(self) -> None:
        room = workroom.room()
        graph_folder = room / self.key.digest[:32] if self.key else None
        self.folder = graph_folder if graph_folder and self.keeps else room / os.urandom(16).hex()
        if graph_folder and graph_folder.is_dir():
            self.outcome, self.reason = "hit", "compiled before by this process"
            self.folder.mkdir(mode=0o700, exist_ok=self.keeps)
            self._known = frozenset(workroom.files_in(self.folder))
            return
        store = default_store.store()
        match = store.find(self.key) if self.key and store else None
        if match:
            try:
                self._use(*match)
            except (OSError, ValueError) as error:
                say(f"a graph is compiled anew: {error}")
                shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def alone(self, before_waiting: Callable[[], None] | None) -> Iterator[None]:
        """Return a context in which only this process compiles the graph, where possible.

        If another process compiles it at that time, wait and take its files; with `before_waiting`
        None, neither lock nor wait. Entered a second time for the backward graph, which an entry
        lacks until a process has needed it.
        """
        first, self._begun = not self._begun, True
        is_hit = first and self.outcome == "hit"
        part = "" if first else "-backward"
        with nullcontext() if is_hit or not before_waiting else self._lock(part, before_waiting):
            if first and self.outcome == "miss":
                self._say_missed()
            yield

    def keep(self) -> None:
        """Add the files that torch has built to the entry; disk errors are logged, not raised."""
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
                blob = workroom.pack_files(self.folder)
                self._known |= new
                why = self.reason.partition(MOST_ALIKE)[0]  # without the line of another graph
                meta = {"files": len(self._known), "why": why, **graph_text.pack_text(self.text)}
                store.put(self.key, meta, blob)
        except OSError as error:
            say(f"a graph is not kept: {error.strerror}")

    def _use(self, entry: Entry, origin: str) -> None:
        """Unpack an entry into the folder, or hold its files for comparison only."""
        if use.recompiles():
            self._kept = workroom.unpack_files(entry.blob)
            self.outcome, self.reason = NOTHING, "torch generated no source"
            return
        self._known = workroom.unpack(entry.blob, self.folder, _is_too_new)
        files = f"{len(self._known)} files, {len(entry.blob) / (1 << 20):.1f} MiB"
        self.outcome, self.reason = "hit", f"{files}, all verified, from {origin}"

    def _lock(self, part: str, before_waiting: Callable[[], None]) -> AbstractContextManager[None]:
        """Return the context that waits for other compilations; a null context if disabled."""
        store = default_store.store()
        path = store.lock_path(self.key, part) if self.key and self.keeps and store else None
        if path is None or use.recompiles():
            return nullcontext()
        return single_flight.alone(path, self._take, before_waiting)

    def _take(self, waited: float) -> bool:
        """Return whether another process has added files to the entry, and unpack them."""
        if waited:
            self._waited = f"waited {waited:.1f} s for who compiled it"
        store, before = default_store.store(), self._known
        match = store.find_new(self.key) if self.key and store else None
        try:
            if match and before:  # a backward graph: the forward's outcome stays
                self._known |= workroom.unpack(match[0].blob, self.folder, _is_too_new)
            elif match:
                self._use(*match)
                self.reason += f", {self._waited}" if waited else ""
        except (OSError, ValueError) as error:
            say(f"a graph is compiled anew: {error}")
        return len(self._known) > len(before)

    def _say_missed(self) -> None:
        """Set and log the reason why the cache has no entry for this graph."""
        store = default_store.store()
        if self.key and store:
            self.reason, texts = why_missed(store, self.key, *self.others)
            differs = graph_text.difference(self.text, texts) if self.text else ""
            most_alike = f"{MOST_ALIKE}{differs}" if differs else ""
            self.reason += (f"; {self._waited}, in vain" if self._waited else "") + most_alike
            log.info("kernel cache: a graph is compiled: %s", self.reason)

    def _compare(self, name: str, stored: Mapping[str, bytes]) -> None:
        """Compare the recompiled files with the entry's, and record and log the result."""
        built = {file: (self.folder / file).read_bytes() for file in workroom.files_in(self.folder)}
        result = compare(name, stored, built)
        if not result.sources:
            return
        self.outcome, self.reason = "different" if result.differing else "same", str(result)
        level = logging.WARNING if result.differing else logging.INFO
        log.log(level, "kernel cache: compiled again, %s", result)
        compared[:] = [*(earlier for earlier in compared if earlier.entry != name), result]


def why_missed(store: Store, *keys: Key) -> tuple[str, Iterator[str]]:
    """Return how the nearest entry of this graph differs from its keys, for the user.

    If no entry holds the graph, also return the texts of up to `COMPARED` other graphs, the most
    recently used first.
    """
    graph = _graph(keys[0].fields)
    same_graph: list[Mapping[str, Any]] = []
    other_metas: list[bytes] = []
    for head in store.heads():
        if _graph(head.key) == graph:
            same_graph.append(head.key)
        elif head.key.get("kind") == KIND and len(other_metas) < COMPARED:
            other_metas.append(head.meta)
    candidates = [near for key in keys if (near := nearest(key, same_graph))]
    if not candidates:
        return IN_NONE, graph_text.read_texts(other_metas)
    _, differences = min(candidates, key=lambda near: len(near[1]))
    return "; ".join(differences) or "its entry cannot be read", iter(())


class VectorChecks:
    """Results of the vector instruction checks of compiler and CPU, stored per machine."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._answers: dict[str, bool] | None = None
        self._kept = 0

    def answers(self) -> MutableMapping[str, bool]:
        """Return the known results, which are read from the store on first use."""
        if self._answers is None:
            store = default_store.store()
            entry = store.get(self._key) if store else None
            stored = entry.meta if entry else {}
            self._answers = {name: v for name, v in stored.items() if type(v) is bool}
            self._kept = len(self._answers)
        return self._answers

    def keep(self) -> None:
        """Store the results if new ones were added since they were read."""
        store = default_store.store()
        if store and self._answers and len(self._answers) > self._kept:
            self._kept = len(self._answers)
            store.put(self._key, dict(self._answers), b"")


def _is_too_new(name: str, data: bytes) -> bool:
    """Return whether a file is a library that this machine's glibc cannot load.

    Such a file is left out and logged; torch or Triton then builds it.
    """
    why = glibc.why_not(data) if name.endswith(".so") else ""
    if why:
        say(f"{name.rpartition('/')[2]} of an entry is built anew: {why}")
    return bool(why)


def _graph(fields: Mapping[str, Any]) -> object:
    """Return the identity of the graph in a key's fields, None if there is none."""
    with suppress(TypeError, ValueError):
        return dict(fields.get("problem", ())).get("graph")
    return None

"""What was decided and why: every room writes here, `explain` and the tests read."""

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

from ipex_inductor.errors import ArgumentError

log = logging.getLogger("ipex_inductor")


@functools.cache
def warn_once(message: str) -> None:
    """A warning that a process gives once."""
    log.warning(message)


KEPT = 256  # graphs whose decisions are remembered

# What an event can be, in the order they are shown.
KINDS = {
    "fallback": "given up: plain Inductor compiled the graph",
    "fired": "a rule or a fold rewrote the graph",
    "hoisted": "work on weights alone, run once and not in every call",
    "choice": "the kernel that was chosen",
    "left": "left to Inductor, which was measured to do it as well",
    "missed": "looked at and refused",
    "cache": "looked for in the kernel cache",
}


@dataclass(frozen=True)
class Event:
    """One decision: `kind` is a key of `KINDS`, `where` the user's line."""

    kind: str
    subject: str
    reason: str = ""
    where: str = ""

    def __str__(self) -> str:
        """One line."""
        reason, where = f" ({self.reason})" * bool(self.reason), f" at {self.where}"
        return f"{self.kind}: {self.subject}{reason}{where * bool(self.where)}"


@dataclass
class GraphReport:
    """The decisions about one graph, or one model, in the order they were taken.

    `source` is "passes" where they ran here, "cache" where the events came with an entry of a graph
    cache, "" where an entry had none, and "optimize" for a model. `stages`: the graph as text, only
    if `explain` asked.
    """

    events: list[Event] = field(default_factory=list)
    source: str = ""
    stages: dict[str, str] | None = None

    def add(self, kind: str, subject: str, reason: str = "", where: str = "") -> None:
        """Note one decision; a fallback is also said once in the log."""
        self.events.append(Event(kind, subject, reason, where))
        level = logging.WARNING if kind == "fallback" else logging.DEBUG
        log.log(level, "%s", self.events[-1])

    def count(self, kind: str) -> dict[str, int]:
        """How often each subject met `kind`."""
        counts: dict[str, int] = {}
        for event in self.events:
            if event.kind == kind:
                counts[event.subject] = counts.get(event.subject, 0) + 1
        return counts

    def show(self, stage: str, graph: Any) -> None:
        """Keep the graph (or source code) as it is at this stage, if somebody wants to read it."""
        if self.stages is not None:
            self.stages[stage] = graph if isinstance(graph, str) else graph_text(graph)

    def summary(self) -> str:
        """One line: how often each thing happened."""
        if not self.source and not self.count("fallback"):
            return "nothing is known: it came out of a graph cache, or joint graph passes are off"
        parts = []
        for kind in KINDS:
            counts = self.count(kind)
            each = ", ".join(name + f" x{n}" * (n > 1) for name, n in counts.items())
            parts += [f"{kind} {each}"] if counts else []
        text = "; ".join(parts) or "nothing of ours to do"
        return f"{text} (out of a graph cache)" if self.source == "cache" else text

    def publish(self) -> None:
        """Say the summary in the log, and all of it as structured trace events (for tlparse).

        What the kernel cache said is in the name of one, as torch's own caches have it:
        `ipex_cache_hit`.
        """
        log.info("%s", self.summary())
        _trace("ipex_passes", "json", self.to_dict)
        for event in self.events:
            if event.kind == "cache":
                _trace(f"ipex_cache_{event.subject.replace(' ', '_')}", "string", event.reason)

    def to_dict(self) -> dict[str, Any]:
        """Source and events as plain data."""
        return {"source": self.source, "events": [asdict(event) for event in self.events]}

    def __str__(self) -> str:
        """A line for each decision."""
        return "\n".join(map(str, self.events)) or "nothing was asked for"


def _trace(name: str, encoding: str, payload: str | Callable[[], Any]) -> None:
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: payload() if callable(payload) else payload,
    )


def graph_text(graph: Any) -> str:
    """An fx graph with one node a line: name, type, call."""
    return "\n".join(map(_node_text, graph.nodes))


def _node_text(node: Any) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    value = _type_text(node.meta.get("val"))
    if node.op == "placeholder":
        return f"{node.name}: {value} = input"
    arguments = [*map(repr, node.args), *(f"{k}={v!r}" for k, v in node.kwargs.items())]
    target = getattr(node.target, "__name__", None) if callable(node.target) else node.target
    space = getattr(node.target, "namespace", "")
    return f"{node.name}: {value} = {space}{'.' * bool(space)}{target}({', '.join(arguments)})"


def _type_text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type_text, value))})"
    if not hasattr(value, "dtype"):
        return type(value).__name__
    shape = ", ".join(map(str, value.shape))
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"


_graphs: deque[GraphReport] = deque(maxlen=KEPT)
_lock = threading.Lock()
_captured: ContextVar[list[GraphReport] | None] = ContextVar("ipex_captured", default=None)
_current: ContextVar[GraphReport | None] = ContextVar("ipex_current", default=None)


def open_report() -> GraphReport:
    """A new, empty report, remembered as the latest."""
    captured = _captured.get()
    if captured is not None:
        captured.append(GraphReport(stages={}))
        return captured[-1]
    report = GraphReport()
    with _lock:
        _graphs.append(report)
    return report


@contextmanager
def capturing() -> Iterator[list[GraphReport]]:
    """Reports opened inside keep the text of their graphs and go into this list alone."""
    captured: list[GraphReport] = []
    token = _captured.set(captured)
    try:
        yield captured
    finally:
        _captured.reset(token)


@contextmanager
def about(report: GraphReport) -> Iterator[GraphReport]:
    """While its graph is compiled `recall` writes to this report; published at the end."""
    token = _current.set(report)
    try:
        yield report
    finally:
        _current.reset(token)
    report.publish()


def current() -> GraphReport | None:
    """The report of the graph that is being compiled or loaded in this thread."""
    return _current.get()


def recall(events: Iterable[Event]) -> None:
    """Give the graph that is being loaded out of a cache the events of its compilation.

    But for what was decided here as well, before it was looked for.
    """
    report = _current.get() or open_report()
    if not report.source:
        report.source = "cache"
        here = {event.subject for event in report.events}
        report.events.extend(event for event in events if event.subject not in here)


def reports() -> list[GraphReport]:
    """The reports of the latest graphs of this process, oldest first."""
    with _lock:
        return list(_graphs)


def clear() -> None:
    """Forget all reports (called by `torch.compiler.reset`)."""
    with _lock:
        _graphs.clear()


def report(model: Any) -> GraphReport:
    """What `optimize` did to `model` and why, which is `model.ipex_report` too.

    Raises `ArgumentError` for a model that did not come out of `optimize`.
    """
    found = getattr(model, "ipex_report", None)
    if isinstance(found, GraphReport):
        return found
    came = f"a {type(model).__name__} without a report"
    todo = "Optimize it first."
    raise ArgumentError("a model that ipex_inductor.optimize returned", came, todo)

"""Decisions and their reasons: every module records them; `explain` and the tests read them."""

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
    """Log a warning once per process."""
    log.warning(message)


KEPT = 256  # number of latest graphs whose decisions are stored

# Kinds of events, in the order of their display.
KINDS = {
    "fallback": "fallback: plain Inductor compiled the graph",
    "fired": "a rule or a fold rewrote the graph",
    "hoisted": "weight preprocessing, run once instead of in every call",
    "choice": "the selected kernel",
    "left": "skipped: Inductor was measured to be as fast",
    "missed": "considered and rejected",
    "cache": "lookup in the kernel cache",
}


@dataclass(frozen=True)
class Event:
    """One decision: `kind` is a key of `KINDS`, `where` the user's line."""

    kind: str
    subject: str
    reason: str = ""
    where: str = ""

    def __str__(self) -> str:
        """Return the decision in one line."""
        reason, where = f" ({self.reason})" * bool(self.reason), f" at {self.where}"
        return f"{self.kind}: {self.subject}{reason}{where * bool(self.where)}"


@dataclass
class GraphReport:
    """The decisions about one graph, or one model, in their order.

    `source` is "passes" if they ran in this process, "cache" if the events came with an entry of a
    graph cache, "" if an entry had none, and "optimize" for a model. `stages`: text of the graph by
    stage, only for `explain`. `lines`: the user's line of each node at the last stage.
    """

    events: list[Event] = field(default_factory=list)
    source: str = ""
    stages: dict[str, str] | None = None
    lines: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, subject: str, reason: str = "", where: str = "") -> None:
        """Record one decision; a fallback is also logged as a warning.

        Args:
            kind: key of `KINDS`.
            subject: the rule, kernel or pass.
            reason: why it was decided.
            where: the user's line.
        """
        self.events.append(Event(kind, subject, reason, where))
        level = logging.WARNING if kind == "fallback" else logging.DEBUG
        log.log(level, "%s", self.events[-1])

    def count(self, kind: str) -> dict[str, int]:
        """Return how often each subject has events of `kind`."""
        counts: dict[str, int] = {}
        for event in self.events:
            if event.kind == kind:
                counts[event.subject] = counts.get(event.subject, 0) + 1
        return counts

    def show(self, stage: str, graph: Any) -> None:
        """Store the graph (or source code) at this stage, if stages are recorded."""
        if self.stages is not None:
            self.stages[stage] = graph if isinstance(graph, str) else graph_text(graph)
            if not isinstance(graph, str):
                self.lines = {node.name: user_line(node) for node in graph.nodes}

    def summary(self) -> str:
        """Return how often each decision occurred, in one line."""
        if not self.source and not self.count("fallback"):
            return "nothing is known: it came out of a graph cache, or joint graph passes are off"
        parts = []
        for kind in KINDS:
            counts = self.count(kind)
            subjects = ", ".join(name + f" x{n}" * (n > 1) for name, n in counts.items())
            parts += [f"{kind} {subjects}"] if counts else []
        text = "; ".join(parts) or "nothing of ours to do"
        return f"{text} (out of a graph cache)" if self.source == "cache" else text

    def publish(self) -> None:
        """Log the summary, and emit all decisions as structured trace events (for tlparse).

        The outcome of the kernel cache is in the name of an event, as in torch's own caches:
        `ipex_cache_hit`.
        """
        log.info("%s", self.summary())
        _trace("ipex_passes", "json", self.to_dict)
        for event in self.events:
            if event.kind == "cache":
                _trace(f"ipex_cache_{event.subject.replace(' ', '_')}", "string", event.reason)

    def to_dict(self) -> dict[str, Any]:
        """Return source and events as plain data."""
        return {"source": self.source, "events": [asdict(event) for event in self.events]}

    def __str__(self) -> str:
        """Return a line for each decision."""
        return "\n".join(map(str, self.events)) or "no decisions"


def _trace(name: str, encoding: str, payload: str | Callable[[], Any]) -> None:
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: payload() if callable(payload) else payload,
    )


def user_line(node: Any) -> str:
    """Return the innermost line of the user's source that created `node`, as file:line text."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if "File " in line]
    return frames[-1] if frames else ""


def graph_text(graph: Any) -> str:
    """Return an fx graph as text with one node per line: name, type, call."""
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
    """Return a new, empty report, stored as the latest."""
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
    """Collect the reports opened inside in this list alone, with the text of their graphs."""
    captured: list[GraphReport] = []
    token = _captured.set(captured)
    try:
        yield captured
    finally:
        _captured.reset(token)


@contextmanager
def about(report: GraphReport) -> Iterator[GraphReport]:
    """Let `recall` write to this report while its graph is compiled; publish it at the end."""
    token = _current.set(report)
    try:
        yield report
    finally:
        _current.reset(token)
    report.publish()


def current() -> GraphReport | None:
    """Return the report of the graph that this thread compiles or loads, or None."""
    return _current.get()


def recall(events: Iterable[Event]) -> None:
    """Add the events of its compilation to the report of a graph loaded from a cache.

    Subjects that were decided in this process before the lookup are left out.
    """
    report = _current.get() or open_report()
    if not report.source:
        report.source = "cache"
        decided = {event.subject for event in report.events}
        report.events.extend(event for event in events if event.subject not in decided)


def reports() -> list[GraphReport]:
    """Return the reports of the latest graphs of this process, oldest first."""
    with _lock:
        return list(_graphs)


def clear() -> None:
    """Forget all reports (called by `torch.compiler.reset`)."""
    with _lock:
        _graphs.clear()


def report(model: Any) -> GraphReport:
    """Return what `optimize` did to `model` and why, which is `model.ipex_report` too.

    Raises:
        ArgumentError: if the model was not returned by `optimize`.
    """
    model_report = getattr(model, "ipex_report", None)
    if isinstance(model_report, GraphReport):
        return model_report
    received = f"a {type(model).__name__} without a report"
    advice = "Optimize it first."
    raise ArgumentError("a model that ipex_inductor.optimize returned", received, advice)

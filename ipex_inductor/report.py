"""What was decided and why: every room writes here, `explain` and the tests read."""

import logging
import threading
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger("ipex_inductor")

KEPT = 256  # graphs whose decisions are remembered


@dataclass(frozen=True)
class Event:
    """One decision: `kind` is "fired", "missed", "hoisted" or "fallback"."""

    kind: str
    subject: str
    reason: str = ""
    where: str = ""


@dataclass
class GraphReport:
    """The decisions about one graph, in the order they were taken."""

    events: list[Event] = field(default_factory=list)

    def add(self, kind: str, subject: str, reason: str = "", where: str = "") -> None:
        """Note one decision; a fallback is also said once in the log."""
        self.events.append(Event(kind, subject, reason, where))
        level = logging.WARNING if kind == "fallback" else logging.DEBUG
        log.log(level, "%s: %s%s", kind, subject, f" ({reason})" if reason else "")

    def count(self, kind: str) -> dict[str, int]:
        """How often each subject met `kind`."""
        counts: dict[str, int] = {}
        for event in self.events:
            if event.kind == kind:
                counts[event.subject] = counts.get(event.subject, 0) + 1
        return counts


_graphs: deque[GraphReport] = deque(maxlen=KEPT)
_lock = threading.Lock()


def open_report() -> GraphReport:
    """A new, empty report, remembered as the latest."""
    report = GraphReport()
    with _lock:
        _graphs.append(report)
    return report


def reports() -> list[GraphReport]:
    """The reports of the latest graphs of this process, oldest first."""
    with _lock:
        return list(_graphs)


def clear() -> None:
    """Forget all reports (called by `torch.compiler.reset`)."""
    with _lock:
        _graphs.clear()

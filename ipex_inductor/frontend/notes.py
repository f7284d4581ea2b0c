"""Report of what `optimize` did, what it did not, and why.

A knob or argument that the user set without effect is logged as a warning.
"""

import logging
from collections.abc import Collection
from typing import Any

from ipex_inductor.reporting.decisions import GraphReport

log = logging.getLogger("IPEX")  # the name and the prefix that users of IPEX filter by


# Arguments whose events exist only if the user passed them.
ARGUMENTS = frozenset({"dtype", "sample_input", "scheduler"})


class Notes:
    """Writer of the report of one call; `asked` names the user's knobs, None for a trial run."""

    def __init__(self, asked: Collection[str] | None) -> None:
        self.report = GraphReport(source="optimize")
        self._aloud = asked is not None
        self._asked = ARGUMENTS.union(asked or ())
        self._said: set[str] = set()

    def after(self, earlier: Any) -> GraphReport:
        """Return this call's report, preceded by events of `earlier` that it does not repeat."""
        if isinstance(earlier, GraphReport):
            repeated = set(self.report.events)
            old = [event for event in earlier.events if event not in repeated]
            self.report.events[:0] = old
        return self.report

    def record_applied(self, knob: str, reason: str = "", where: str = "") -> None:
        """Record that something was changed in the model."""
        self.report.add("fired", knob, reason, where)

    def record_skipped(self, knob: str, reason: str) -> None:
        """Record that torch or the graph passes do this instead."""
        self.report.add("left", knob, reason)

    def hint(self, knob: str, reason: str) -> None:
        """Record what would gain more, and log it as information: no request was refused."""
        self.record_skipped(knob, reason)
        if self._aloud:
            log.info("%s", reason)

    def record_rejected(self, knob: str, reason: str, where: str = "", text: str = "") -> None:
        """Record that something was not done, and warn if the user asked for it.

        Args:
            knob: the knob or argument.
            reason: why it was not done.
            where: the name of the module, "" for the model.
            text: the message that IPEX has for it, "" for one made of the reason.
        """
        self.report.add("missed", knob, reason, where)
        text = text or f"{knob}: {reason}" + f" ({where})" * bool(where)
        if self._aloud and text not in self._said:
            self._said.add(text)
            level = logging.WARNING if knob in self._asked else logging.INFO
            log.log(level, "[NotSupported]%s", text)

"""What `optimize` did, what it did not and why; the user is warned of what he asked for himself."""

import logging
from collections.abc import Collection
from typing import Any

from ipex_inductor.reporting.decisions import GraphReport

log = logging.getLogger("IPEX")  # the name and the prefix that users of IPEX filter by


# Not done only if the user gave them.
ARGUMENTS = frozenset({"dtype", "sample_input", "scheduler"})


class Notes:
    """Writes the report of one call. `asked` names the knobs that the user set; None is a trial."""

    def __init__(self, asked: Collection[str] | None) -> None:
        self.report = GraphReport(source="optimize")
        self._aloud = asked is not None
        self._asked = ARGUMENTS.union(asked or ())
        self._said: set[str] = set()

    def after(self, earlier: Any) -> GraphReport:
        """This call's report, behind what an `earlier` one says and this one does not repeat."""
        if isinstance(earlier, GraphReport):
            again = set(self.report.events)
            old = [event for event in earlier.events if event not in again]
            self.report.events[:0] = old
        return self.report

    def done(self, knob: str, reason: str = "", where: str = "") -> None:
        """Something was changed in the model."""
        self.report.add("fired", knob, reason, where)

    def left(self, knob: str, reason: str) -> None:
        """Somebody else does that as well: torch, or the graph passes."""
        self.report.add("left", knob, reason)

    def hint(self, knob: str, reason: str) -> None:
        """Note what would gain more, and log it as information: nothing asked for was refused."""
        self.left(knob, reason)
        if self._aloud:
            log.info("%s", reason)

    def missed(self, knob: str, reason: str, where: str = "", text: str = "") -> None:
        """It was not done. `text` is the message that users of IPEX know, else the reason is it."""
        self.report.add("missed", knob, reason, where)
        text = text or f"{knob}: {reason}" + f" ({where})" * bool(where)
        if self._aloud and text not in self._said:
            self._said.add(text)
            level = logging.WARNING if knob in self._asked else logging.INFO
            log.log(level, "[NotSupported]%s", text)

"""`ipex_inductor.explain`: compile a model once, and say what was done to each graph and why."""

import contextlib
import difflib
import functools
import io
import itertools
import json
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.text import Text
from torch.utils._pytree import tree_leaves

from ipex_inductor import __version__, compat
from ipex_inductor.capture.policy import at_once
from ipex_inductor.inspection.capture_reports import compile_reporting, restore_tensors
from ipex_inductor.inspection.kernel_times import (
    TIMED_RUNS,
    KernelTime,
    recorded_kernels,
    time_kernels,
)
from ipex_inductor.reporting.decisions import KINDS, GraphReport
from ipex_inductor.reporting.html_page import render_page
from ipex_inductor.reporting.listing import Listing, number, show

# Words of the page: the heading of each kind of decision, its level (a class of the shared style),
# its meaning, and the names of a graph's stages.
LABELS = {
    "fallback": "Fallback",
    "fired": "Applied",
    "hoisted": "Precomputed",
    "choice": "Kernel selected",
    "left": "Skipped",
    "missed": "Rejected",
    "cache": "Kernel cache",
}
LEVELS = {"fallback": "bad", "fired": "good", "hoisted": "good", "missed": "warn"}
MEANINGS = {
    "fallback": "The passes of ipex failed or did not run. Plain Inductor compiled the graph.",
    "fired": "A rule, or a fold of constants, rewrote this part of the graph.",
    "hoisted": "Work on weights that runs once after compilation, not in every call.",
    "choice": "The kernel that runs this operator.",
    "left": "A rule matched, but Inductor was measured to be as fast.",
    "missed": "A rule almost matched. The reason names the condition that failed.",
    "cache": "The result of a lookup in the kernel cache.",
}
STAGE_NAMES = {
    "traced": "traced from the model",
    "rewritten": "rewritten by ipex",
    "compiled": "passed to Inductor's code generator",
}
LINES_OPEN = 200  # a comparison of graphs with more changed lines is closed at first
CONTEXT = 3  # unchanged lines displayed on each side of a changed line
OPERATOR = re.compile(r"(?<![\w.])ipex\.\w+(?:\.\w+)?")  # in the text of a graph

COLORS = {"fallback": "red", "fired": "green", "hoisted": "green", "missed": "yellow"}
LINES_SHOWN = 3  # most lines of the user's source in a row of the table

# A kernel call in generated code. In Python: a library's op, an extern kernel, a compiled kernel or
# a kernel of this package; in C++: a library's op or a kernel of this package.
KERNEL = re.compile(
    r"^\s+(?:\w+ = )?(?:(?:torch\.ops\.([\w.]+?)(?:\.default)?|extern_kernels\.(\w+)"
    r"|((?:cpp|triton|ipex)_\w+?)(?:\.run)?"
    r"|AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cpu_(\w+?)(?:_out)?)\(|/\* (ipex_\w+) \*/)",
    re.MULTILINE,
)
RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")  # Dynamo's name of the rest of a frame


@dataclass(frozen=True)
class Row:
    """Equal decisions of one graph: `kind` as in `decisions.KINDS`, `where` the user's lines."""

    kind: str
    subject: str
    count: int
    reason: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class Break:
    """A graph break of Dynamo: its reason, its place, how to avoid it."""

    reason: str
    where: str
    details: str


@dataclass(frozen=True)
class Change:
    """A line of a graph before and after a pass: `mark` is " ", "-", "+" or "~"."""

    mark: str
    before: str
    after: str


@dataclass(frozen=True)
class PageLine:
    """A row of the page's text of a graph.

    `far` lines are unchanged and away from changes: they are hidden at first. A row with `hidden`
    stands for that many of them.
    """

    mark: str
    before: str = ""
    after: str = ""
    far: bool = False
    hidden: int = 0


@dataclass(frozen=True)
class GraphExplanation:
    """One graph: its decisions, the kernels it calls with their counts, its text by stage.

    Stages: "traced" by AOT autograd, "rewritten" by the rules, "compiled" by Inductor.
    """

    summary: str
    rows: tuple[Row, ...]
    kernels: Mapping[str, int]
    stages: Mapping[str, str]

    def changes(self) -> list[tuple[str, str, list[Change]]]:
        """Return the differences from each stage to the next: (from, to, lines)."""
        return [(a, b, _diff(self.stages[a], self.stages[b])) for a, b in pairwise(self.stages)]


@dataclass(frozen=True)
class Explanation:
    """Everything that backend `ipex` did to a model; `str()` is a table."""

    title: str
    graphs: tuple[GraphExplanation, ...]
    breaks: tuple[Break, ...]
    kernel_times: tuple[KernelTime, ...] = ()  # only with `time_kernels`

    def fired(self) -> dict[str, int]:
        """Return how often each rule or fold was applied, over all graphs."""
        counts: Counter[str] = Counter()
        for row in (row for graph in self.graphs for row in graph.rows):
            counts[row.subject] += row.count * (row.kind == "fired")
        return dict(+counts)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the text of the graphs, as plain data."""
        graphs = [
            {"rows": [asdict(row) for row in graph.rows], "kernels": dict(graph.kernels)}
            for graph in self.graphs
        ]
        return {
            "schema": 1,
            **_versions(),
            "title": self.title,
            "graphs": graphs,
            "breaks": [asdict(graph_break) for graph_break in self.breaks],
            "kernel_times": [asdict(kernel) for kernel in self.kernel_times],
        }

    def to_json(self) -> str:
        """Return `to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Return a self-contained page, with every graph before and after the passes."""
        facts = {
            "explanation": self,
            "versions": _versions(),
            "totals": _totals(self),
            "total_time": sum(kernel.microseconds for kernel in self.kernel_times) or 1.0,
            "timed_runs": TIMED_RUNS,
            "kinds": MEANINGS,
            "labels": LABELS,
            "levels": {kind: LEVELS.get(kind, "") for kind in KINDS},
            "stages": STAGE_NAMES,
            "lines_open": LINES_OPEN,
            "fold_unchanged": _fold_unchanged,
            "mark_operators": _mark_operators,
        }
        return render_page(Path(__file__).with_name("explanation.html.jinja"), facts)

    def __rich__(self) -> Group:
        """Return the tables, for a rich console."""
        parts: list[Any] = [Text(self.title, "bold"), ""]
        if not self.graphs:
            parts.append(Text("Dynamo found no graph to compile.", "yellow"))
        for index, graph in enumerate(self.graphs):
            parts += _render_graph(f"graph {index}", graph)
        if self.breaks:
            parts.append(_break_table(self.breaks))
        return Group(*parts)

    def __str__(self) -> str:
        """Return the tables as a terminal of 100 columns shows them, without colours."""
        console = Console(file=io.StringIO(), width=100, color_system=None, force_terminal=True)
        with console.capture() as text:
            show(console, self)
        return "\n".join(line.rstrip() for line in text.get().splitlines())


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    compile_args: Mapping[str, Any] | None = None,
    with_kernel_times: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Compile `model` with backend `ipex`, run it once on the inputs, and explain what was done.

    The model's train or eval mode and the grad mode are used as they are. Graph caches are off for
    this run, and it leaves no traces: written buffers and inputs, random state, counters and
    compiled frames are restored. Graphs that may be captured run a few more times, to be timed.
    Exceptions of the model are raised.

    Args:
        model: a module or another callable.
        inputs: positional arguments of the model.
        compile_args: arguments of `torch.compile` (`mode`, `options`, `dynamic`).
        with_kernel_times: also time each kernel, in a few more runs of the model.
        kwargs: keyword arguments of the model.
    """
    graph_reports: list[GraphReport] = []
    written = [*_buffers(model), *_tensors((inputs, kwargs))]
    kernel_times: tuple[KernelTime, ...] = ()
    with (
        compat.dynamo_unchanged() as breaks,
        restore_tensors(written),
        compat.graph_caches_off(),
        at_once(),
        recorded_kernels() if with_kernel_times else contextlib.nullcontext(),
    ):
        run = compile_reporting(model, graph_reports, **(compile_args or {}))
        run(*inputs, **kwargs)
        graphs = tuple(map(_explain_graph, graph_reports))  # of the first run alone
        if with_kernel_times:
            kernel_times = time_kernels(lambda: run(*inputs, **kwargs))
    title = _title(model, compile_args or {})
    return Explanation(title, graphs, _explain_breaks(breaks), kernel_times)


def _buffers(model: Callable[..., Any]) -> list[torch.Tensor]:
    return list(model.buffers()) if isinstance(model, torch.nn.Module) else []


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _explain_graph(graph_report: GraphReport) -> GraphExplanation:
    stages = dict(graph_report.stages or {})
    calls = KERNEL.findall(stages.pop("code", ""))
    kernels = Counter(next(filter(None, names)) for names in calls)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for event in graph_report.events:
        groups.setdefault((event.kind, event.subject, event.reason), []).append(event.where)
    rows = [
        Row(kind, subject, len(frames), reason, _unique_places(frames))
        for (kind, subject, reason), frames in groups.items()
    ]
    rows.sort(key=lambda row: list(KINDS).index(row.kind))
    return GraphExplanation(graph_report.summary(), tuple(rows), dict(kernels), stages)


def _explain_breaks(dynamo_breaks: Iterable[Any]) -> tuple[Break, ...]:
    """Return one break per place: Dynamo repeats it for each frame that inlined the place."""
    by_place: dict[str, Break] = {}
    for graph_break in map(_explain_break, dynamo_breaks):
        by_place.setdefault(graph_break.where, graph_break)
    return tuple(by_place.values())


def _explain_break(dynamo_break: Any) -> Break:
    reason, _, details = str(dynamo_break.reason).partition("\n")
    if reason.startswith("generic_jump"):
        reason = f"a branch on the value of a tensor ({reason})"
    frame = dynamo_break.user_stack[-1] if dynamo_break.user_stack else None
    where = f'File "{frame.filename}", line {frame.lineno}, in {frame.name}' if frame else ""
    return Break(
        reason, _short_place(where), "\n".join(map(str.strip, details.strip().splitlines()))
    )


def _unique_places(frames: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_short_place(frame) for frame in frames if frame))


def _short_place(frame: str) -> str:
    """Return `File "/here/model.py", line 7, in forward` as `model.py:7 in forward`.

    Paths of installed files begin at their package.
    """
    match = re.match(r'File "(.+)", line (\d+), in (.+)', frame)
    if match is None:
        return frame
    path, working_dir = match[1].rpartition("/site-packages/")[2], f"{Path.cwd()}/"
    function = RESUMED.sub(r"\1", match[3])
    return f"{path.removeprefix(working_dir)}:{match[2]} in {function}"


def _diff(before: str, after: str) -> list[Change]:
    a, b = before.splitlines(), after.splitlines()
    changes = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        mark = {"equal": " ", "delete": "-", "insert": "+", "replace": "~"}[tag]
        for row in range(max(j - i, m - k)):
            old_line = a[i + row] if i + row < j else ""
            new_line = b[k + row] if k + row < m else ""
            changes.append(Change(mark, old_line, new_line))
    return changes


def _fold_unchanged(changes: Sequence[Change]) -> Iterator[PageLine]:
    """Yield the lines of a graph's text; far ones follow a row with their number."""
    near = {
        line
        for index, change in enumerate(changes)
        if change.mark != " "
        for line in range(index - CONTEXT, index + CONTEXT + 1)
    }
    for far, group in itertools.groupby(enumerate(changes), lambda item: item[0] not in near):
        lines = [change for _, change in group]
        if far:
            yield PageLine(" ", hidden=len(lines))
        yield from (PageLine(line.mark, line.before, line.after, far) for line in lines)


def _mark_operators(line: str) -> Any:
    """Return the line as markup with the operators of this package in `mark` elements."""
    from markupsafe import Markup, escape

    return Markup(OPERATOR.sub(r"<mark>\g<0></mark>", str(escape(line))))


def _totals(explanation: Explanation) -> list[tuple[str, int, str]]:
    """Return the counts at the top of the page: (label, count, level)."""
    counts: Counter[str] = Counter()
    for row in (row for graph in explanation.graphs for row in graph.rows):
        counts[row.kind] += row.count
    calls = sum(sum(graph.kernels.values()) for graph in explanation.graphs)
    return [
        ("graphs", len(explanation.graphs), ""),
        ("rewrites applied", counts["fired"], "good"),
        ("rewrites rejected", counts["missed"], "warn"),
        ("kernel calls", calls, ""),
        ("graph breaks", len(explanation.breaks), "warn"),
        ("graphs compiled by plain Inductor", counts["fallback"], "bad"),
    ]


def _title(model: Callable[..., Any], compile_args: Mapping[str, Any]) -> str:
    name = getattr(model, "__qualname__", type(model).__name__)
    arguments = "".join(f", {key}={value!r}" for key, value in compile_args.items())
    return f"{name}{arguments}"


@functools.cache
def _versions() -> Mapping[str, str]:
    return types.MappingProxyType({"torch": compat.VERSION, "ipex_inductor": __version__})


def _render_graph(title: str, graph: GraphExplanation) -> Iterator[Any]:
    """Yield one graph as a table, and its kernels."""
    if graph.rows:
        table = Listing("", "what", number("n"), "why", "where", title=title)
        for row in graph.rows:
            lines = list(row.where[:LINES_SHOWN])
            more = len(row.where) - len(lines)
            lines += [f"and {more} more lines"] if more else []
            color = COLORS.get(row.kind, "")
            cells = (row.subject, str(row.count), row.reason, "\n".join(lines))
            table.add_row(Text(row.kind, color), *map(Text, cells))
        yield table
    else:
        yield Text(f"{title}: {graph.summary}", "italic")
    if graph.kernels:
        calls = (name + f" x{n}" * (n > 1) for name, n in graph.kernels.items())
        yield Text(f"kernels: {', '.join(calls)}")
    yield ""


def _break_table(breaks: Sequence[Break]) -> Listing:
    table = Listing("why", "where", title="graph breaks")
    for graph_break in breaks:
        why = f"{graph_break.reason}\n{graph_break.details.partition(chr(10))[0]}".rstrip()
        table.add_row(Text(why), Text(graph_break.where))
    return table

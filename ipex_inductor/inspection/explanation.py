"""`ipex_inductor.explain`: compile a model once, and say what was done to each graph and why."""

import difflib
import functools
import io
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
from ipex_inductor.inspection.capture_reports import compiled, unchanged
from ipex_inductor.reporting.decisions import KINDS, GraphReport
from ipex_inductor.reporting.listing import Listing, number, show

COLORS = {"fallback": "red", "fired": "green", "hoisted": "green", "missed": "yellow"}
LINES_SHOWN = 3  # of the user's source, a row of the table

# A call in code that Inductor generated: of a library's op, an extern kernel, one that it compiled
# or one of ours; in C++ of a library's or one of ours.
KERNEL = re.compile(
    r"^\s+(?:\w+ = )?(?:(?:torch\.ops\.([\w.]+?)(?:\.default)?|extern_kernels\.(\w+)"
    r"|((?:cpp|triton|ipex)_\w+?)(?:\.run)?"
    r"|AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cpu_(\w+?)(?:_out)?)\(|/\* (ipex_\w+) \*/)",
    re.MULTILINE,
)
RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")  # Dynamo's name of the rest of a frame


@dataclass(frozen=True)
class Row:
    """Equal decisions of one graph: `kind` as in `report.KINDS`, `where` the user's lines."""

    kind: str
    subject: str
    count: int
    reason: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class Break:
    """A place where Dynamo had to stop a graph, the reason it gave, how to avoid it."""

    reason: str
    where: str
    details: str


@dataclass(frozen=True)
class Change:
    """A line of a graph on both sides of a pass: `mark` is " ", "-", "+" or "~"."""

    mark: str
    before: str
    after: str


@dataclass(frozen=True)
class GraphExplanation:
    """One graph: what was decided, the kernels it calls with their counts, its text by stage.

    Stages: "traced" as AOT autograd gave it, "rewritten" by the rules, "compiled" by Inductor.
    """

    summary: str
    rows: tuple[Row, ...]
    kernels: Mapping[str, int]
    stages: Mapping[str, str]

    def changes(self) -> list[tuple[str, str, list[Change]]]:
        """The differences from each stage to the next: (from, to, lines)."""
        return [(a, b, _diff(self.stages[a], self.stages[b])) for a, b in pairwise(self.stages)]


@dataclass(frozen=True)
class Explanation:
    """What backend `ipex` did to a model; `str()` is a table."""

    title: str
    graphs: tuple[GraphExplanation, ...]
    breaks: tuple[Break, ...]

    def fired(self) -> dict[str, int]:
        """How often each rule or fold fired, over all graphs."""
        counts: Counter[str] = Counter()
        for row in (row for graph in self.graphs for row in graph.rows):
            counts[row.subject] += row.count * (row.kind == "fired")
        return dict(+counts)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the text of the graphs, as plain data."""
        graphs = [
            {"rows": [asdict(row) for row in graph.rows], "kernels": dict(graph.kernels)}
            for graph in self.graphs
        ]
        breaks = [asdict(found) for found in self.breaks]
        return {"schema": 1, **_versions(), "title": self.title, "graphs": graphs, "breaks": breaks}

    def to_json(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """One self-contained page, with every graph before and after the passes."""
        from jinja2 import Environment, StrictUndefined

        page = Path(__file__).with_name("explanation.html.jinja").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, undefined=StrictUndefined)
        facts = {"explanation": self, "versions": _versions(), "kinds": KINDS}
        return environment.from_string(page).render(facts)

    def __rich__(self) -> Group:
        """The tables, for a rich console."""
        parts: list[Any] = [Text(self.title, "bold"), ""]
        if not self.graphs:
            parts.append(Text("Dynamo found no graph to compile.", "yellow"))
        for index, graph in enumerate(self.graphs):
            parts += _shown(f"graph {index}", graph)
        if self.breaks:
            parts.append(_break_table(self.breaks))
        return Group(*parts)

    def __str__(self) -> str:
        """The same as a terminal of 100 columns shows it, without colours."""
        console = Console(file=io.StringIO(), width=100, color_system=None, force_terminal=True)
        with console.capture() as text:
            show(console, self)
        return "\n".join(line.rstrip() for line in text.get().splitlines())


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    compile_args: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile `model` with backend `ipex`, run it once on the inputs, and say what was done.

    `compile_args` are those of `torch.compile` (`mode`, `options`, `dynamic`); the train or eval
    mode of the model and the grad mode are the caller's. Graph caches are off for this run, and
    nothing is left of it: buffers and inputs written, random state, counters and compiled frames
    are put back. Graphs that may be captured run some more times, to be timed. What the model
    raises is raised.
    """
    seen: list[GraphReport] = []
    written = [*_buffers(model), *_tensors((inputs, kwargs))]
    with (
        compat.dynamo_unchanged() as breaks,
        unchanged(written),
        compat.graph_caches_off(),
        at_once(),
    ):
        compiled(model, seen, **(compile_args or {}))(*inputs, **kwargs)
    return Explanation(
        _title(model, compile_args or {}),
        tuple(map(_explain_graph, seen)),
        _explain_breaks(breaks),
    )


def _buffers(model: Callable[..., Any]) -> list[torch.Tensor]:
    return list(model.buffers()) if isinstance(model, torch.nn.Module) else []


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _explain_graph(seen: GraphReport) -> GraphExplanation:
    stages = dict(seen.stages or {})
    found = KERNEL.findall(stages.pop("code", ""))
    kernels = Counter(next(filter(None, names)) for names in found)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for event in seen.events:
        groups.setdefault((event.kind, event.subject, event.reason), []).append(event.where)
    rows = [
        Row(kind, subject, len(frames), reason, _places(frames))
        for (kind, subject, reason), frames in groups.items()
    ]
    rows.sort(key=lambda row: list(KINDS).index(row.kind))
    return GraphExplanation(seen.summary(), tuple(rows), dict(kernels), stages)


def _explain_breaks(found: Iterable[Any]) -> tuple[Break, ...]:
    """One a place: Dynamo says it again for each frame that the place was inlined into."""
    places: dict[str, Break] = {}
    for each in map(_explain_break, found):
        places.setdefault(each.where, each)
    return tuple(places.values())


def _explain_break(found: Any) -> Break:
    reason, _, details = str(found.reason).partition("\n")
    if reason.startswith("generic_jump"):
        reason = f"a branch on the value of a tensor ({reason})"
    frame = found.user_stack[-1] if found.user_stack else None
    where = f'File "{frame.filename}", line {frame.lineno}, in {frame.name}' if frame else ""
    return Break(reason, _place(where), "\n".join(map(str.strip, details.strip().splitlines())))


def _places(frames: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_place(frame) for frame in frames if frame))


def _place(frame: str) -> str:
    """`File "/here/model.py", line 7, in forward` as `model.py:7 in forward`.

    What is installed is named from its package on.
    """
    match = re.match(r'File "(.+)", line (\d+), in (.+)', frame)
    if match is None:
        return frame
    path, here = match[1].rpartition("/site-packages/")[2], f"{Path.cwd()}/"
    function = RESUMED.sub(r"\1", match[3])
    return f"{path.removeprefix(here)}:{match[2]} in {function}"


def _diff(before: str, after: str) -> list[Change]:
    a, b = before.splitlines(), after.splitlines()
    changes = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        mark = {"equal": " ", "delete": "-", "insert": "+", "replace": "~"}[tag]
        for row in range(max(j - i, m - k)):
            left = a[i + row] if i + row < j else ""
            right = b[k + row] if k + row < m else ""
            changes.append(Change(mark, left, right))
    return changes


def _title(model: Callable[..., Any], compile_args: Mapping[str, Any]) -> str:
    name = getattr(model, "__qualname__", type(model).__name__)
    told = "".join(f", {key}={value!r}" for key, value in compile_args.items())
    return f"{name}{told}"


@functools.cache
def _versions() -> Mapping[str, str]:
    return types.MappingProxyType({"torch": compat.VERSION, "ipex_inductor": __version__})


def _shown(title: str, graph: GraphExplanation) -> Iterator[Any]:
    """One graph as a table and its kernels."""
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
        each = (name + f" x{n}" * (n > 1) for name, n in graph.kernels.items())
        yield Text(f"kernels: {', '.join(each)}")
    yield ""


def _break_table(breaks: Sequence[Break]) -> Listing:
    table = Listing("why", "where", title="graph breaks")
    for found in breaks:
        why = f"{found.reason}\n{found.details.partition(chr(10))[0]}".rstrip()
        table.add_row(Text(why), Text(found.where))
    return table

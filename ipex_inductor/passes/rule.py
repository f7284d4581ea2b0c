"""The rule engine: a fusion is two functions and an equation.

Both functions are traced, so a rule is written in plain torch. What Inductor's matcher does with
a traced pattern is not exact enough (it ignores keywords the pattern leaves at their default:
`gelu` matches `gelu(approximate="tanh")`), so patterns are built here with every default spelt
out and every constant but the sizes of views fixed; those are checked by the shape of the result.
"""

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import counters
from torch._inductor.pattern_matcher import (
    CallFunction,
    Ignored,
    KeywordArg,
    Match,
    PatternExpr,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from ipex_inductor.passes.whole_ops import reduced_table
from ipex_inductor.report import GraphReport

Examples = Callable[[], list[torch.Tensor]]

VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


@dataclass(frozen=True)
class Rule:
    """`pattern => replacement`, named by the left-hand side of its `equation`.

    `examples` make the inputs the pattern is traced with, one set a form (2-D, 3-D ...). `whole`
    names the ops the pattern needs undecomposed. `when` gets the matched values by argument name
    and returns None, or the reason why this match must be left alone.
    """

    equation: str
    pattern: Callable[..., torch.Tensor]
    replacement: Callable[..., torch.Tensor]
    examples: tuple[Examples, ...]
    whole: tuple[str, ...]
    when: Callable[[Mapping[str, Any]], str | None]

    @property
    def name(self) -> str:
        """The left-hand side without spaces: `linear+gelu`."""
        return self.equation.split("=>")[0].replace(" ", "")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of what the pattern matches."""
        return tuple(inspect.signature(self.pattern).parameters)


@dataclass(frozen=True)
class _Run:
    off: frozenset[str]
    report: GraphReport


_run: contextvars.ContextVar[_Run] = contextvars.ContextVar("ipex_rules")


@contextmanager
def _running(run: _Run) -> Iterator[None]:
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def whole_ops(rules: Sequence[Rule]) -> frozenset[str]:
    """The names of all ops that some rule needs whole."""
    return frozenset(name for rule in rules for name in rule.whole)


def apply_rules(
    rules: Sequence[Rule], graph: torch.fx.Graph, off: frozenset[str], report: GraphReport
) -> None:
    """Rewrite `graph` by every rule not in `off`; write what fired, and what did not, down."""
    if "*" in off:
        return
    with _running(_Run(off, report)):
        matcher(tuple(rules)).apply(graph)


@functools.cache
def matcher(rules: tuple[Rule, ...]) -> PatternMatcherPass:
    """The rules as one Inductor pass of our own, traced on first use."""
    own = PatternMatcherPass(pass_name="ipex_rules")
    whole = whole_ops(rules)
    for rule in rules:
        for examples in rule.examples:
            register_graph_pattern(
                _pattern(rule, examples(), whole),
                extra_check=functools.partial(_accept, rule),
                pass_dict=own,
            )(functools.partial(_rewrite, rule))
    return own


@torch.no_grad()
def _pattern(rule: Rule, examples: list[torch.Tensor], whole: frozenset[str]) -> PatternExpr:
    """The rule's pattern as an expression of Inductor's matcher."""
    with enable_python_dispatcher():
        gm = make_fx(rule.pattern, reduced_table(whole), tracing_mode="real")(*examples)
    gm.graph.eliminate_dead_code()
    names = iter(rule.arguments)
    built: dict[torch.fx.Node, Any] = {}  # PatternExpr; fx types its arguments more narrowly
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            built[node] = KeywordArg(next(names))
        elif node.op == "call_function":
            built[node] = _call(node, built)
    (result,) = gm.graph.output_node().all_input_nodes
    expression: PatternExpr = built[result]
    return expression


def _call(node: torch.fx.Node, built: dict[torch.fx.Node, Any]) -> PatternExpr:
    args: Any = map_arg(node.args, lambda n: built[n])
    kwargs = {**_keyword_defaults(node.target), **node.kwargs}
    if node.target in VIEWS:
        args = (args[0], Ignored())
    return CallFunction(node.target, *args, _users=max(1, len(node.users)), **kwargs)


def _keyword_defaults(op: Any) -> dict[str, Any]:
    arguments = op._schema.arguments
    return {a.name: a.default_value for a in arguments if a.kwarg_only and a.has_default_value()}


def _accept(rule: Rule, match: Match) -> bool:
    run = _run.get()
    if rule.name in run.off:
        return False
    where = _user_line(match.output_node())
    values = {name: _value(match.kwargs[name]) for name in rule.arguments}
    reason = _other_shape(rule, values, match.output_node()) or rule.when(values)
    if reason is not None:
        run.report.add("missed", rule.name, reason, where)
        return False
    run.report.add("fired", rule.name, where=where)
    counters["ipex"][rule.name] += 1
    return True


def _rewrite(rule: Rule, match: Match, **matched: Any) -> None:
    match.replace_by_example(rule.replacement, [matched[name] for name in rule.arguments])


def _value(matched: Any) -> Any:
    return matched.meta["val"] if isinstance(matched, torch.fx.Node) else matched


def _other_shape(rule: Rule, values: Mapping[str, Any], output: torch.fx.Node) -> str | None:
    """A reason unless the pattern's own result has the dtype and shape found in the graph."""
    found = output.meta["val"]
    try:
        with V.fake_mode, torch.no_grad():
            own = rule.pattern(**values)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"the pattern cannot take these inputs: {error}"
    same = own.dtype == found.dtype and own.dim() == found.dim()
    if same and all(map(_equal, own.shape, found.shape)):
        return None
    return f"a view between changes the shape: {tuple(own.shape)} became {tuple(found.shape)}"


def _equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _user_line(node: torch.fx.Node) -> str:
    """The innermost line of the user's source that made `node`, as file:line text."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if "File " in line]
    return frames[-1] if frames else ""

"""The rule engine: a fusion is two traced functions and an equation."""

import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import counters
from torch._inductor.pattern_matcher import Match, PatternMatcherPass, register_replacement
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor.passes.whole_ops import reduced_table
from ipex_inductor.report import GraphReport

Examples = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class Rule:
    """`pattern => replacement`, named by the left-hand side of its `equation`.

    `examples` make the inputs the pair is traced with, one set a form (2-D, 3-D ...). `whole`
    names the ops the pattern needs undecomposed. `when` gets the matched values by argument name
    and returns None, or the reason why this match must be left alone.
    """

    equation: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    examples: tuple[Examples, ...]
    whole: tuple[str, ...]
    when: Callable[[Mapping[str, Any]], str | None]

    @property
    def name(self) -> str:
        """The left-hand side without spaces: `linear+gelu`."""
        return self.equation.split("=>")[0].replace(" ", "")


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
    """The rules as one Inductor pass of our own, traced on first use (some 15 ms a form)."""
    own = PatternMatcherPass(pass_name="ipex_rules")
    trace = functools.partial(_trace, whole_ops(rules))
    for rule in rules:
        for examples in rule.examples:
            register_replacement(
                rule.pattern,
                rule.replacement,
                examples(),
                trace,
                own,
                extra_check=functools.partial(_accept, rule),
            )
    return own


@torch.no_grad()
def _trace(
    whole: frozenset[str], fn: Callable[..., Any], args: Sequence[Any], **_: Any
) -> torch.fx.GraphModule:
    """An inference graph in which the ops called `whole` are not decomposed."""
    with enable_python_dispatcher():
        gm = make_fx(fn, reduced_table(whole), tracing_mode="real")(*args)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _accept(rule: Rule, match: Match) -> bool:
    run = _run.get()
    if rule.name in run.off:
        return False
    where = _user_line(match.output_node())
    values = {
        name: arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg
        for name, arg in match.kwargs.items()
    }
    reason = rule.when(values)
    if reason is not None:
        run.report.add("missed", rule.name, reason, where)
        return False
    run.report.add("fired", rule.name, where=where)
    counters["ipex"][rule.name] += 1
    return True


def _user_line(node: torch.fx.Node) -> str:
    """The innermost line of the user's source that made `node`, as file:line text."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if "File " in line]
    return frames[-1] if frames else ""

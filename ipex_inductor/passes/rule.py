"""The rule engine: a fusion is two functions and an equation.

Both functions are traced, so a rule is written in plain torch. What Inductor's matcher does with
a traced pattern is not exact enough (it ignores keywords the pattern leaves at their default:
`gelu` matches `gelu(approximate="tanh")`), so patterns are built here with every default spelt
out and every constant but the sizes of views fixed; those are checked by the shape of the result.
"""

import contextvars
import functools
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from ipex_inductor.passes.whole_ops import WHOLE, reduced_table
from ipex_inductor.report import GraphReport

# Arguments by number that a pattern leaves open: the sizes of a view (the shape of the result is
# checked instead), the output padding of a convolution (meaningless unless it is transposed).
OPEN: dict[Any, int] = {
    torch.ops.aten.view.default: 1,
    torch.ops.aten.reshape.default: 1,
    torch.ops.aten.convolution.default: 7,
}

# Commutative ops whose operands a rule may name in either order.
COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)

# Our name of an activation -> the aten op that it is in a graph, which rules need whole.
ACTIVATIONS = {
    "relu": "relu",
    "relu6": "hardtanh",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "gelu": "gelu",
    "gelu_tanh": "gelu",
    "silu": "silu",
    "hardswish": "hardswish",
    "hardsigmoid": "hardsigmoid",
}


@dataclass(frozen=True)
class Constant:
    """An example argument that is no tensor: it matches any value, and must be met nowhere else."""

    value: Any


Example = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Rule:
    """`pattern => replacement`, named by the left-hand side of its `equation`.

    Each of `examples` gives arguments to trace it with, one set a form (2-D, 3-D, no bias ...):
    tensors, `Constant`s, or None for what that form lacks. `anchor` is the aten op the pattern ends
    in, kept whole. `when` gets the matched values by argument name and returns None, or the
    reason why this match must be left alone.
    """

    equation: str
    pattern: Callable[..., torch.Tensor]
    replacement: Callable[..., torch.Tensor]
    examples: tuple[Example, ...]
    anchor: str
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
    """The names of the ops that some rule needs whole and Inductor would decompose."""
    return frozenset(rule.anchor for rule in rules) & frozenset(WHOLE)


def apply_rules(
    rules: Sequence[Rule], graph: torch.fx.Graph, off: frozenset[str], report: GraphReport
) -> None:
    """Rewrite `graph` by every rule not in `off`; write what fired, and what did not, down."""
    if "*" in off:
        return
    packets = {getattr(n.target, "overloadpacket", None) for n in graph.nodes}
    present = tuple(r for r in rules if getattr(torch.ops.aten, r.anchor) in packets)
    with _running(_Run(off, report)):
        for rule in present:
            matcher(rule).apply(graph)


@functools.cache
def matcher(rule: Rule) -> PatternMatcherPass:
    """The rule as an Inductor pass of our own, built when a graph first holds its anchor."""
    own = PatternMatcherPass(pass_name=f"ipex {rule.name}")
    for example in rule.examples:
        arguments = example()
        for pattern in _patterns(rule, arguments):
            register_graph_pattern(
                pattern,
                extra_check=functools.partial(_accept, rule, arguments),
                pass_dict=own,
            )(functools.partial(_rewrite, rule, arguments))
    return own


@torch.no_grad()
def _patterns(rule: Rule, arguments: Mapping[str, Any]) -> list[PatternExpr]:
    """The rule's pattern as expressions of Inductor's matcher, one an order of operands."""
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    constants = {k: v.value for k, v in arguments.items() if isinstance(v, Constant)}

    def call(*values: torch.Tensor) -> torch.Tensor:
        known = {**arguments, **constants, **dict(zip(tensors, values, strict=True))}
        return rule.pattern(*known.values())

    with FakeTensorMode(), enable_python_dispatcher():
        fakes = [torch.empty_strided(t.size(), t.stride()) for t in tensors.values()]
        gm = make_fx(call, reduced_table(frozenset(WHOLE)), tracing_mode="real")(*fakes)
    gm.graph.eliminate_dead_code()
    swaps = [False, True] if any(n.target in COMMUTATIVE for n in gm.graph.nodes) else [False]
    return [_expression(gm.graph, list(tensors), constants, swap) for swap in swaps]


def _expression(
    graph: torch.fx.Graph, names: list[str], constants: Mapping[str, Any], swap: bool
) -> PatternExpr:
    free = iter(names)
    built: dict[torch.fx.Node, Any] = {}  # PatternExpr; fx types its arguments more narrowly
    for node in graph.nodes:
        if node.op == "placeholder":
            built[node] = KeywordArg(next(free))
        elif node.op == "call_function":
            built[node] = _call(node, built, constants, swap)
    (result,) = graph.output_node().all_input_nodes
    expression: PatternExpr = built[result]
    return expression


def _call(
    node: torch.fx.Node, built: dict[torch.fx.Node, Any], constants: Mapping[str, Any], swap: bool
) -> PatternExpr:
    def free(value: Any) -> Any:
        names = [name for name, constant in constants.items() if value == constant]
        return KeywordArg(names[0]) if names else value

    args: Any = map_arg(tuple(map(free, node.args)), lambda n: built[n])
    number = OPEN.get(node.target)
    if number is not None:
        args = (*args[:number], Ignored(), *args[number + 1 :])
    if swap and node.target in COMMUTATIVE:
        args = (args[1], args[0], *args[2:])
    kwargs = {**_keyword_defaults(node.target), **node.kwargs}
    return CallFunction(node.target, *args, _users=max(1, len(node.users)), **kwargs)


def _keyword_defaults(op: Any) -> dict[str, Any]:
    arguments = op._schema.arguments
    return {a.name: a.default_value for a in arguments if a.kwarg_only and a.has_default_value()}


def _accept(rule: Rule, arguments: Mapping[str, Any], match: Match) -> bool:
    run = _run.get()
    if rule.name in run.off:
        return False
    where = _user_line(match.output_node())
    values = {name: _value(match.kwargs.get(name)) for name in arguments}
    reason = (
        _not_tensors(arguments, values)
        or _other_shape(rule, values, match.output_node())
        or rule.when(values)
    )
    if reason is not None:
        run.report.add("missed", rule.name, reason, where)
        return False
    run.report.add("fired", rule.name, where=where)
    counters["ipex"][rule.name] += 1
    return True


def _not_tensors(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    wanted = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    numbers = [name for name in wanted if not isinstance(values[name], torch.Tensor)]
    return f"{numbers[0]} is no tensor" if numbers else None


def _rewrite(rule: Rule, arguments: Mapping[str, Any], match: Match, **matched: Any) -> None:
    """Only tensors are traced: the replacement closes over all else."""
    nodes = {k: v for k, v in matched.items() if isinstance(v, torch.fx.Node)}

    def replacement(*values: torch.Tensor) -> torch.Tensor:
        known = {**dict.fromkeys(arguments), **matched, **dict(zip(nodes, values, strict=True))}
        return rule.replacement(*known.values())

    match.replace_by_example(replacement, list(nodes.values()))


def _value(matched: Any) -> Any:
    return matched.meta["val"] if isinstance(matched, torch.fx.Node) else matched


def _other_shape(rule: Rule, values: Mapping[str, Any], output: torch.fx.Node) -> str | None:
    """A reason unless the pattern's own result has the dtype and shape found in the graph."""
    found = output.meta["val"]
    try:
        with V.fake_mode, torch.no_grad():
            own = rule.pattern(*values.values())
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

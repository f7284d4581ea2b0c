"""The rule engine: a fusion is two functions and an equation.

Both functions are traced, so a rule is written in plain torch. Inductor's matcher is not exact
enough on a traced pattern: it ignores keywords that the pattern leaves at their default, so `gelu`
matches `gelu(approximate="tanh")`. Patterns are therefore built here with every default spelt out
and every constant but the sizes of views fixed; the sizes are checked by the shape of the result.
"""

import contextvars
import functools
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import counters
from torch._inductor.pattern_matcher import (
    MULTIPLE,
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

from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import WHOLE, keep_strides, reduced_table
from ipex_inductor.reporting.decisions import GraphReport

# Arguments by number that a pattern leaves open: the sizes of views (the shape of the result is
# checked instead), the output padding of a convolution (meaningless unless it is transposed).
OPEN: dict[Any, int] = {
    torch.ops.aten.view.default: 1,
    torch.ops.aten.reshape.default: 1,
    torch.ops.aten.expand.default: 1,
    torch.ops.aten.convolution.default: 7,
}

# Commutative ops, whose operands may come in either order.
COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


@dataclass(frozen=True)
class Constant:
    """An example argument that is no tensor; it matches any value, and must occur nowhere else."""

    value: Any


@dataclass(frozen=True)
class Form:
    """One way to write a pattern: the aten ops that it `needs`, and arguments to trace it with.

    The arguments, by name, are tensors, `Constant`s, or None for what this form lacks.
    """

    needs: frozenset[str]
    example: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Rule:
    """A rewrite `pattern => replacement`, named by the left-hand side of its `equation`.

    Pattern and replacement take the arguments of `forms` by name. `anchor` is an aten op of the
    pattern, kept whole. `when` gets the matched values by name and the `result`; it returns None,
    or the reason why this match is rejected. Arguments named in `weights` must be parameters,
    buffers or computed from them.

    Without a replacement the rule only reports its matches: `note` gives the measurement in favour
    of Inductor's own code. With `op`, whose result and layout equal the pattern's, `replacement`
    returns its arguments: nothing is traced.

    A rule is for inference graphs, or for `training` graphs. There a match is rejected, with a
    reason, where the backward reads what would vanish; the backward itself is not rewritten. A
    match that a rule `claims` without replacing it is not rewritten by a later rule either.
    """

    equation: str
    pattern: Callable[..., torch.Tensor]
    replacement: Callable[..., Any] | None
    forms: tuple[Form, ...]
    anchor: str
    when: Callable[[Mapping[str, Any]], str | None]
    weights: tuple[str, ...] = ()
    op: Any = None
    note: str = ""
    training: bool = False
    claims: bool = False

    @property
    def name(self) -> str:
        """The left-hand side without spaces: `linear+gelu`."""
        return self.equation.split("=>")[0].replace(" ", "")


@dataclass(frozen=True)
class _Run:
    """The state of one `apply_rules`."""

    off: frozenset[str]
    weights: Container[torch.fx.Node]
    report: GraphReport
    reported: set[tuple[str, torch.fx.Node]]  # two operand orders may find one match twice
    claimed: set[torch.fx.Node]


_run: contextvars.ContextVar[_Run] = contextvars.ContextVar("ipex_rules")


@contextmanager
def _running(run: _Run) -> Iterator[None]:
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def whole_ops(rules: Sequence[Rule]) -> frozenset[str]:
    """Return the names of the ops that some rule needs whole and Inductor would decompose."""
    return frozenset(rule.anchor for rule in rules) & frozenset(WHOLE)


def apply_rules(
    rules: Sequence[Rule],
    graph: torch.fx.Graph,
    weights: Container[torch.fx.Node],
    off: frozenset[str],
    report: GraphReport,
) -> None:
    """Rewrite `graph` by every rule that is not in `off`; report the outcome of each match.

    Args:
        rules: The rules, in order.
        graph: The graph, changed in place.
        weights: Nodes that are parameters or buffers, or computed from them alone.
        off: Names of rules that are off.
        report: Gets the decisions.
    """
    ops = {getattr(n.target, "overloadpacket", None) for n in graph.nodes}
    names = {packet.__name__ for packet in ops if packet is not None}
    with _running(_Run(off, weights, report, set(), set())):
        for rule in rules:
            for form in rule.forms:
                if rule.anchor in names and form.needs <= names:
                    matcher(rule, form).apply(graph)


@functools.cache
def matcher(rule: Rule, form: Form) -> PatternMatcherPass:
    """Return one form of a rule as an Inductor pass, built when a graph may contain it."""
    matcher_pass = PatternMatcherPass(pass_name=f"ipex {rule.name}")
    arguments = form.example()
    for pattern in _patterns(rule, arguments):
        register_graph_pattern(
            pattern,
            extra_check=functools.partial(_accept, rule, arguments),
            pass_dict=matcher_pass,
        )(functools.partial(_rewrite, rule, arguments))
    return matcher_pass


@torch.no_grad()
def _patterns(rule: Rule, arguments: Mapping[str, Any]) -> list[PatternExpr]:
    """Return the rule's pattern as expressions for Inductor's matcher, one per operand order."""
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    constants = {k: v.value for k, v in arguments.items() if isinstance(v, Constant)}

    def call(*values: torch.Tensor) -> torch.Tensor:
        all_arguments = {**arguments, **constants, **dict(zip(tensors, values, strict=True))}
        return rule.pattern(**all_arguments)

    with FakeTensorMode(), enable_python_dispatcher():
        fakes = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype) for t in tensors.values()]
        gm = make_fx(call, reduced_table(frozenset(WHOLE)), tracing_mode="real")(*fakes)
    gm.graph.eliminate_dead_code()
    # Operands that are both tensors may stand in either order; a number always comes second.
    swappable = [n for n in gm.graph.nodes if n.target in COMMUTATIVE and len(_operands(n)) == 2]
    orders = itertools.product([False, True], repeat=len(swappable))
    return [
        _expression(rule, gm.graph, list(tensors), constants, set(itertools.compress(swappable, o)))
        for o in orders
    ]


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [arg for arg in node.args[:2] if isinstance(arg, torch.fx.Node)]


def _expression(
    rule: Rule,
    graph: torch.fx.Graph,
    names: list[str],
    constants: Mapping[str, Any],
    swapped: Container[torch.fx.Node],
) -> PatternExpr:
    free = iter(names)
    built: dict[torch.fx.Node, Any] = {}  # PatternExpr; fx types its arguments more narrowly
    for node in graph.nodes:
        if node.op == "placeholder":
            built[node] = KeywordArg(next(free))
        elif node.op == "call_function":
            built[node] = _call(rule, node, built, constants, node in swapped)
    (result,) = graph.output_node().all_input_nodes
    expression: PatternExpr = built[result]
    return expression


def _call(
    rule: Rule,
    node: torch.fx.Node,
    built: dict[torch.fx.Node, Any],
    constants: Mapping[str, Any],
    swap: bool,
) -> PatternExpr:
    def free(value: Any) -> Any:
        names = [name for name, constant in constants.items() if value == constant]
        return KeywordArg(names[0]) if names else value

    args: Any = map_arg(tuple(map(free, node.args)), lambda n: built[n])
    number = OPEN.get(node.target)
    if number is not None and not isinstance(args[number], KeywordArg):
        args = (*args[:number], Ignored(), *args[number + 1 :])
    if swap:
        args = (args[1], args[0], *args[2:])
    kwargs = {**_keyword_defaults(node.target), **node.kwargs}
    users: Any = MULTIPLE if rule.training else max(1, len(node.users))
    return CallFunction(node.target, *args, _users=users, **kwargs)


def _keyword_defaults(op: Any) -> dict[str, Any]:
    if not isinstance(op, torch._ops.OpOverload):
        return {}
    arguments = op._schema.arguments
    return {a.name: a.default_value for a in arguments if a.kwarg_only and a.has_default_value()}


def _accept(rule: Rule, arguments: Mapping[str, Any], match: Match) -> bool:
    run = _run.get()
    if rule.name in run.off or (rule.training and is_backward(match.output_node())):
        return False
    where = user_line(match.output_node())
    values = {name: _value(match.kwargs.get(name)) for name in arguments}
    if match.output_node() in run.claimed:
        return False
    if any(values[name] is None for name in values if arguments[name] is not None):
        return False  # another form of the rule: without a bias
    reason = (
        _not_tensors(arguments, values)
        or _not_weights(rule, match)
        or _other_shape(rule, values, match.output_node())
        or (_read_elsewhere(match) if rule.training and rule.replacement else None)
        or rule.when({**values, "result": match.output_node().meta["val"]})
    )
    key = (rule.name, match.output_node())
    if reason is not None or rule.replacement is None:
        if key not in run.reported:
            kind = "left" if reason is None else "missed"
            run.report.add(kind, rule.name, reason or rule.note, where)
        run.reported.add(key)
        if reason is None and rule.claims:
            run.claimed.update(match.nodes)
        return False
    run.report.add("fired", rule.name, where=where)
    counters["ipex"][rule.name] += 1
    return True


def _not_tensors(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    wanted = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    numbers = [name for name in wanted if not isinstance(values[name], torch.Tensor)]
    return f"{numbers[0]} is no tensor" if numbers else None


def _not_weights(rule: Rule, match: Match) -> str | None:
    weights = _run.get().weights
    varying = [name for name in rule.weights if match.kwargs[name] not in weights]
    return f"{varying[0]} is not a parameter or buffer" if varying else None


def _read_elsewhere(match: Match) -> str | None:
    """Return a reason if nodes outside the match read what the rewrite would remove.

    Views of inputs are not counted.
    """
    computed: set[torch.fx.Node] = set()
    for node in match.nodes:  # inputs first
        is_input_view = computed.isdisjoint(node.all_input_nodes) and node.target.is_view  # type: ignore[union-attr]
        if is_input_view or node is match.output_node():
            continue
        computed.add(node)
        outer_users = [user for user in node.users if user not in match.nodes]
        if any(map(is_backward, outer_users)):
            return f"the backward reads {node}"
        if outer_users:
            return f"{node} has {len(node.users)} users"
    return None


def is_backward(node: torch.fx.Node) -> bool:
    """Return whether AOT autograd traced `node` in the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def _rewrite(rule: Rule, arguments: Mapping[str, Any], match: Match, **matched: Any) -> None:
    assert rule.replacement is not None
    nodes = {k: v for k, v in matched.items() if isinstance(v, torch.fx.Node)}
    all_arguments = {**dict.fromkeys(arguments), **matched}
    if rule.op is not None:
        output = match.output_node()
        with output.graph.inserting_before(output):
            call = output.graph.call_function(rule.op, rule.replacement(**all_arguments))
        call.meta = dict(output.meta)
        output.replace_all_uses_with(call)
        match.erase_nodes()
        keep_strides(call.graph, call)
        return

    def replacement(*values: torch.Tensor) -> torch.Tensor:
        """Return the replacement of these tensors; all other arguments are closed over."""
        assert rule.replacement is not None
        result: torch.Tensor = rule.replacement(
            **all_arguments | dict(zip(nodes, values, strict=True))
        )
        return result

    match.replace_by_example(replacement, list(nodes.values()))


def _value(matched: Any) -> Any:
    return map_arg(matched, lambda node: node.meta["val"])


def _other_shape(rule: Rule, values: Mapping[str, Any], output: torch.fx.Node) -> str | None:
    """Return a reason unless the pattern's result has the dtype and shape found in the graph."""
    found = output.meta["val"]
    try:
        with V.fake_mode, torch.no_grad():
            own = rule.pattern(**values)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"the pattern cannot take these inputs: {error}"
    if own.dtype == found.dtype and equal_shapes(own, found):
        return None
    return f"a view between changes the shape: {tuple(own.shape)} became {tuple(found.shape)}"


def equal_shapes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two shapes are known to be equal, for all values of symbols."""
    return a.dim() == b.dim() and all(map(same_size, a.shape, b.shape))


def same_size(a: Any, b: Any) -> bool:
    """Return whether two sizes are known to be equal."""
    return statically_known_true(a == b)

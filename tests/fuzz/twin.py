"""The fp64 twin: a graph rewritten as for float32, run in float64 against eager in float64.

Graph rewrites do not depend on the dtype, and in float64 a right one differs from eager by 1e-15,
a wrong one by far more than 1e-10. So the graph is captured with the dtypes the rules look for,
and only the replay is wide: every floating-point dtype in it becomes float64, and our ops run
their reference implementations.

A dynamic program is captured with symbols for its batch and lengths, as Dynamo has them, and
replayed at two sizes, unless what it says holds for the first alone.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._inductor.fx_passes.joint_graph import canonicalize_aten_ir_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_leaves, tree_map

from fuzz.program import Program, wide_arguments
from ipex_inductor import ops  # noqa: F401  registers the ipex:: ops
from ipex_inductor.errors import PassError
from ipex_inductor.passes import joint
from ipex_inductor.passes.attention import attention
from ipex_inductor.passes.engine.whole_ops import reduced_table
from ipex_inductor.passes.pass_context import PassSettings
from ipex_inductor.passes.weights import prologue
from ipex_inductor.passes.weights.packing import PACKERS
from ipex_inductor.reporting.decisions import GraphReport

# Two summation orders in float64 differ by some 1e-15 of the largest value, times what the program
# amplifies; the smallest seeded fault (an epsilon of 1e-5 for 1e-3) by 1e-4.
TOLERANCE = 1e-10
# What is zero but for rounding (the gradient of a key's bias behind softmax) has no relative error:
# it is measured against the largest of all values compared.
FLOOR = 1e-2
# Eager is no better here: its kernel writes 1/6 as a float32 in the gradient of hardsigmoid, and
# the gradient of what batch statistics normalise away is a difference of nearly equal sums ("True,
# 0.1" ends the call of a batch norm in training; it is the same with every rule off).
ROUNDED = {"hardsigmoid": 1e-7, "True, 0.1": 2e-9}

# What is left to Inductor on other machines is rewritten too, so that all of them judge the same.
MACHINE = "x86-64:amx"

aten = torch.ops.aten
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Strides in float64 may be others than in the captured dtype (oneDNN's convolution runs
# channels-last), and a view takes only those it was made for.
REPLAYED = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    **dict.fromkeys(PACKERS, lambda weight, *_: weight),
}


class Mismatch(Exception):
    """The rewritten graph is not the program: what differs, where."""


class Untrainable(Exception):
    """Eager itself has no backward for this program."""


@dataclass(frozen=True)
class Trial:
    """A program at one choice of its sizes: what each symbol of its graph stands for."""

    program: Program
    known: dict[sympy.Symbol, sympy.Integer]

    def size(self, size: Any) -> Any:
        """A size as a number."""
        return int(size.node.expr.xreplace(self.known)) if hasattr(size, "node") else size

    def sizes(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        """A shape, or strides, as numbers."""
        return tuple(map(self.size, sizes))

    def broken(self, shapes: ShapeEnv) -> list[str]:
        """The guards that do not hold at these sizes."""
        known = {guard.expr: guard.expr.xreplace(self.known) for guard in shapes.guards}
        return [str(expr) for expr, holds in known.items() if holds != sympy.true]


@dataclass
class Captured:
    """One graph of AOT autograd with what it takes to compile it.

    Its inputs are `static` parameters and buffers, `symbols` (none unless the program is dynamic),
    then the program's own.
    """

    gm: torch.fx.GraphModule
    context: TracingContext
    mode: FakeTensorMode
    static: int
    symbols: list[Any]
    trials: list[Trial]
    forward_outputs: int
    joint: bool

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Where a pass runs: in what AOT autograd and `compile_fx` have around it."""
        with ExitStack() as stack:
            stack.enter_context(V.set_fake_mode(self.mode))
            stack.enter_context(tracing(self.context))
            stack.enter_context(torch.set_grad_enabled(self.joint))
            stack.enter_context(_use_lazy_graph_module(True))
            stack.enter_context(self.mode)
            machine = mock.patch.object(attention, "architecture", return_value=MACHINE)
            stack.enter_context(machine)
            if self.shapes is not None:  # else some fake ops take a symbol for a number
                stack.enter_context(enable_python_dispatcher())
            yield

    def check_sizes(self, graph: torch.fx.Graph) -> None:
        """Raises `Mismatch` where a pass made it a graph for fewer sizes than it was.

        But torch's attention compares the widths of heads to choose its kernel: there the sizes it
        leaves out are not tried.
        """
        broken = {text for t in self.trials if t.known for text in t.broken(self.shapes)}
        if broken and not any("scaled_dot_product" in str(node.target) for node in graph.nodes):
            raise Mismatch(f"a pass made it a graph for {', '.join(broken)} alone")
        if broken:
            self.trials = [trial for trial in self.trials if not trial.broken(self.shapes)]

    @property
    def shapes(self) -> Any:
        """What is known of the symbols."""
        return self.mode.shape_env

    def copy(self) -> torch.fx.GraphModule:
        """A graph to rewrite."""
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.gm.graph, {}))
        graph.output_node().meta = dict(self.gm.graph.output_node().meta)
        with _use_lazy_graph_module(True):
            return _make_graph_module(self.gm, graph)

    def values(self, trial: Trial, leaves: Sequence[torch.Tensor]) -> list[Any]:
        """What the graph takes, from the leaves of the program in order."""
        weights, inputs = leaves[: self.static], leaves[self.static :]
        return [*weights, *map(trial.size, self.symbols), *inputs]


@dataclass
class Verdict:
    """What was seen of one program: events of the passes in inference and in training, whether it
    could be trained, and at how many sizes its graphs were replayed."""

    events: list[Any] = field(default_factory=list)
    in_training: list[Any] = field(default_factory=list)
    trained: bool = True
    sizes: int = 0


class _Captured(Exception):
    """Ends AOT autograd once it has the joint graph."""


def capture(program: Program, training: bool) -> Captured:
    """The graph that backend ipex would be given: inference, or joint forward and backward."""
    dtype = DTYPES[program.dtype]
    inputs: list[Any] = [_requiring(x, training) for x in program.inputs(dtype)]
    shapes = ShapeEnv() if program.dynamic else None
    mode = FakeTensorMode(shape_env=shapes)
    symbols: list[Any] = []
    if shapes is not None:
        free = dict(program.dynamic)
        inputs = [_symbolic(mode, x, free, f"x{number}") for number, x in enumerate(inputs)]
        symbols = _symbols(inputs)
    module = _Traced(program.module(dtype), len(symbols), copied=training)
    context = TracingContext(mode)
    found: list[tuple[Any, int]] = []
    static = len(program.of_kind("parameter", "buffer"))

    def inference(gm: Any, _: Any) -> Any:
        # Dynamo marks parameters and buffers; without it AOT autograd knows of none.
        context.fw_metadata.static_input_indices = list(range(static))
        found.append((gm, 0))
        return gm

    def partition(gm: Any, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append((gm, num_fwd_outputs))
        raise _Captured

    grad, lazy = torch.set_grad_enabled(training), _use_lazy_graph_module(True)
    with V.set_fake_mode(mode), tracing(context), grad, lazy:
        with suppress(_Captured):
            aot_module_simplified(
                module,
                [*symbols, *inputs],
                inference,
                inference,
                partition,
                reduced_table(joint.WHOLE),
                keep_inference_input_mutations=True,
                inference_compiler=inference,
            )
        ((gm, count),) = found
        canonicalize_aten_ir_passes(gm)  # Inductor's, before any custom pass
    trials = _trials(program, inputs, shapes)
    return Captured(gm, context, mode, static, symbols, trials, count, training)


def _symbolic(mode: FakeTensorMode, x: torch.Tensor, free: Container[int], name: str) -> Any:
    """`x` with a symbol for each of its sizes that is in `free`, the same for the same."""
    dims = [DimDynamic.DUCK if n in free else DimDynamic.STATIC for n in x.shape]
    context = StatelessSymbolicContext(dynamic_sizes=dims)
    return mode.from_tensor(x, source=LocalSource(name), symbolic_context=context)


def _symbols(inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The sizes of `inputs` that are symbols, each once."""
    sizes = [n for x in inputs for n in x.shape if not isinstance(n, int)]
    return list({n.node.expr: n for n in sizes}.values())


def _trials(
    program: Program, inputs: Sequence[torch.Tensor], shapes: ShapeEnv | None
) -> list[Trial]:
    """The program as it is, then at other sizes: as many as the guards of the graph allow."""
    if shapes is None:
        return [Trial(program, {})]
    alone = (dataclasses.replace(program, dynamic=(pair,)) for pair in program.dynamic)
    others = (_trial(p.resized(), inputs) for p in (program, *alone))
    second = next((trial for trial in others if not trial.broken(shapes)), None)
    first = _trial(program, inputs)
    return [first, second] if second else [first]


def _trial(program: Program, inputs: Sequence[torch.Tensor]) -> Trial:
    known = {}
    for x, leaf in zip(inputs, program.of_kind("input"), strict=True):
        symbols = [n.node._expr if hasattr(n, "node") else None for n in x.shape]
        known |= dict(zip(symbols, map(sympy.Integer, leaf.shape), strict=True))
    known.pop(None, None)
    return Trial(program, known)


class _Traced(torch.nn.Module):
    """`module` taking `symbols` sizes first, as the graphs of Dynamo do.

    `copied` results share no memory with anything: AOT autograd has no bookkeeping to add.
    """

    def __init__(self, module: torch.nn.Module, symbols: int, copied: bool):
        super().__init__()
        for name, value in module.named_parameters():
            self.register_parameter(name, value)
        for name, value in module.named_buffers():
            self.register_buffer(name, value)
        self._call, self._symbols, self._copied = module._call, symbols, copied

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        results = self._call(self, *inputs[self._symbols :])
        return tuple(result.clone() for result in results) if self._copied else results


def rewrite(
    captured: Captured, off: frozenset[str] = frozenset()
) -> tuple[torch.fx.GraphModule, GraphReport]:
    """A copy of the captured graph after our joint pass, and what it reported."""
    gm, report = captured.copy(), GraphReport()
    with captured.compiling():
        try:
            joint.JointPass("", PassSettings(off, captured.joint), report, [])(gm.graph)
        except PassError as error:
            raise Mismatch(f"the pass failed: {error}") from error
    captured.check_sizes(gm.graph)
    return gm, report


def replay(graph: torch.fx.Graph, inputs: Sequence[Any], trial: Trial) -> list[Any]:
    """Run `graph` in float64; each value must have the shape the graph says."""
    env: dict[torch.fx.Node, Any] = {}
    free = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(free)
        elif node.op == "get_attr":
            env[node] = _wide(getattr(graph.owning_module, node.target))
        elif node.op == "output":
            return [env.get(n) for n in _leaves(node)]
        else:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            try:
                env[node] = _call(node.target, args, kwargs)
            except Exception as error:
                raise Mismatch(f"{node.format_node()} cannot run: {error}") from error
            _check_shape(node, env[node], trial)
    raise AssertionError("a graph without an output")


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    """The op on wide values; ours on plain weights, because the packers did nothing."""
    args, kwargs = wide_arguments(args), wide_arguments(kwargs)
    if getattr(target, "namespace", "") == "ipex":
        names = [argument.name for argument in target._schema.arguments]
        args = [type(v)() if n == "packed" else v for n, v in zip(names, args, strict=False)]
    return REPLAYED.get(target, target)(*args, **kwargs)


def _wide(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


def _check_shape(node: torch.fx.Node, value: Any, trial: Trial) -> None:
    said = node.meta.get("val")
    if isinstance(said, torch.Tensor) and isinstance(value, torch.Tensor):
        shape = trial.sizes(said.shape)
        if shape != tuple(value.shape):
            raise Mismatch(f"{node.format_node()} gives {tuple(value.shape)}, not {shape}")


def judge(program: Program, training: bool = True, off: frozenset[str] = frozenset()) -> Verdict:
    """Raises `Mismatch` unless the program rewritten is the program, forward and backward."""
    verdict = Verdict()
    judge_inference(program, capture(program, False), verdict, off)
    if training:
        try:
            judge_training(program, verdict, off)
        except Untrainable:
            verdict.trained = False
    return verdict


def fails(program: Program, training: bool = True) -> bool:
    """Whether the rewritten program is wrong (what is no program at all is not)."""
    try:
        judge(program, training)
    except Mismatch:
        return True
    except Exception:
        return False
    return False


def judge_inference(
    program: Program, captured: Captured, verdict: Verdict, off: frozenset[str] = frozenset()
) -> None:
    """The inference graph after the joint pass, then split into prologue and graph."""
    with torch.no_grad(), wide_default():
        gm, report = rewrite(captured, off)
        verdict.events += report.events
        verdict.sizes = len(captured.trials)
        tried = [(trial, *_eager(trial.program, captured, trial)) for trial in captured.trials]
        for trial, values, want in tried:
            check_metadata(captured.gm.graph, gm.graph, trial)
            got = replay(gm.graph, [_copy(v) for v in values], trial)
            compare(got, want, "result")
        with captured.compiling():
            fakes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
            parts = prologue.split(gm, fakes, range(captured.static), report)
        captured.check_sizes(gm.graph)
        for trial, values, want in tried:
            if parts is not None:
                derived = [v for program in parts.programs for v in run_program(program, values)]
                got = replay(parts.gm.graph, [*values, *derived], trial)
                compare(got, want, "result behind the prologue")


def _eager(program: Program, captured: Captured, trial: Trial) -> tuple[list[Any], Any]:
    """What the graph takes, and what eager makes of it."""
    module, inputs = program.module(torch.float64), program.inputs(torch.float64)
    leaves = [*module.parameters(), *module.buffers(), *inputs]
    values = captured.values(trial, [v.detach().clone() for v in leaves])
    return values, module(*inputs)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def run_program(program: Any, values: Sequence[torch.Tensor]) -> list[Any]:
    """What the prologue computes, in float64 (`Program.run` would round to the weights' dtype)."""
    from ipex_inductor.passes.weights import program as straight

    known: list[Any] = [values[i] for i in program.inputs]
    for step in program.steps:
        target = operator.getitem if step.op == "getitem" else straight._function(step.op)
        args, kwargs = tree_map(
            lambda v: known[v.index] if isinstance(v, straight.Ref) else v,
            (step.args, dict(step.kwargs)),
        )
        known.append(_call(target, args, kwargs))
    return [known[ref.index] for ref in program.outputs]


@dataclass(frozen=True)
class Trained:
    """A program forward and backward in eager: its leaves, results, tangents and gradients."""

    leaves: list[torch.Tensor]
    results: list[torch.Tensor]
    tangents: list[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]


def train(program: Program) -> Trained:
    """Raises `Untrainable` where eager has no gradient."""
    module = program.module(torch.float64)
    inputs = [_requiring(x, True) for x in program.inputs(torch.float64)]
    leaves = [*module.parameters(), *module.buffers(), *inputs]
    values = [v.detach().clone().requires_grad_(v.requires_grad) for v in leaves]
    trained = [v for v in leaves if v.requires_grad]
    try:
        results = module(*inputs)
        wanted = [r for r in results if r.requires_grad]
        if not wanted:
            raise Untrainable
        tangents = [_tangent(r, i) for i, r in enumerate(wanted)]
        gradients = torch.autograd.grad(wanted, trained, tangents, allow_unused=True)
    except RuntimeError as error:  # a value needed for the gradient was changed in place
        raise Untrainable from error
    return Trained(values, [r.detach() for r in results], tangents, gradients)


def judge_training(program: Program, verdict: Verdict, off: frozenset[str] = frozenset()) -> None:
    """The joint graph after the joint pass: results and the gradient of every leaf."""
    with wide_default():
        first = train(program)  # before anything is captured: there may be no backward
        captured = capture(program, True)
        gm, report = rewrite(captured, off)
        verdict.in_training += report.events
        for trial in captured.trials:
            eager = first if trial.program is program else train(trial.program)
            with torch.no_grad():
                check_metadata(captured.gm.graph, gm.graph, trial)
                values = [*captured.values(trial, eager.leaves), *eager.tangents]
                got = replay(gm.graph, values, trial)
            compare_trained(captured, got, eager, str(program.steps))


def compare_trained(captured: Captured, got: Sequence[Any], eager: Trained, text: str) -> None:
    """What the joint graph returned: results, then a gradient for each of its inputs."""
    count, symbols = captured.forward_outputs, len(captured.symbols)
    results, grads = got[:count][-len(eager.results) :], got[count:]
    compare(results, eager.results, "result in training")
    del grads[captured.static : captured.static + symbols]
    pairs = zip(grads, eager.leaves, strict=True)
    loosest = max((t for word, t in ROUNDED.items() if word in text), default=TOLERANCE)
    compare([g for g, v in pairs if v.requires_grad], eager.gradients, "gradient", loosest)


def _tangent(result: torch.Tensor, number: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(number)
    return torch.randn(result.shape, generator=random, dtype=torch.float64)


@contextmanager
def wide_default() -> Iterator[None]:
    """New tensors are float64, as in a float64 program."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _requiring(value: torch.Tensor, training: bool) -> torch.Tensor:
    return value.requires_grad_() if training and value.is_floating_point() else value


def check_metadata(before: torch.fx.Graph, after: torch.fx.Graph, trial: Trial) -> None:
    """What leaves the graph keeps dtype, shape and strides, and is as many values as before."""
    if len(set(_leaves(after.output_node()))) < len(set(_leaves(before.output_node()))):
        raise Mismatch("two results became one tensor, which the caller may write")
    for number, (old, new) in enumerate(zip(*map(outputs_of, (before, after)), strict=True)):
        was, now = describe(old, trial.sizes), describe(new, trial.sizes)
        if was != now:
            raise Mismatch(f"result {number} is {now}, not {was}")


def outputs_of(graph: torch.fx.Graph) -> list[Any]:
    """The fake values that leave the graph."""
    values = _leaves(graph.output_node())
    return [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in values]


def _leaves(output: torch.fx.Node) -> list[Any]:
    """What a graph returns, None where a gradient is missing."""
    return tree_leaves(output.args, is_leaf=lambda value: value is None)


def describe(value: Any, sizes: Callable[[Any], tuple[int, ...]] = tuple) -> Any:
    """dtype, shape and the strides that mean something (not over one element, not of nothing)."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = sizes(value.shape), sizes(value.stride())
    steps = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    return value.dtype, shape, None if 0 in shape else steps


def compare(
    got: Sequence[Any], want: Sequence[Any], what: str, tolerance: float = TOLERANCE
) -> None:
    """Raises `Mismatch` unless each pair agrees to `tolerance` of the largest value."""
    if len(got) != len(want):
        raise Mismatch(f"{len(got)} of {what}, not {len(want)}")
    largest = max((_largest(w) for w in want), default=0.0)
    if what == "gradient":
        largest = max(largest, 1.0)  # of the tangents, if every gradient is rounding
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        error = distance(a, b, FLOOR * largest)
        if error > tolerance:
            raise Mismatch(f"{what} {number}: relative error {error:.1e}")


def distance(got: Any, want: Any, floor: float = 0.0) -> float:
    """The largest difference relative to the largest finite value, at least to `floor`.

    None is a gradient of zero; what is not finite must be so in the same places.
    """
    if got is None or want is None:
        known = want if got is None else got
        return 0.0 if known is None or not known.any() else math.inf
    if got.shape != want.shape:
        return math.inf
    finite = want.isfinite()
    if not torch.isclose(got[~finite], want[~finite], equal_nan=True).all():
        return math.inf
    if not finite.any():
        return 0.0
    error = float((got[finite] - want[finite]).abs().max())
    error = error / max(_largest(want), floor, 1e-30)
    return math.inf if math.isnan(error) else error


def _largest(value: Any) -> float:
    if value is None:
        return 0.0
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0

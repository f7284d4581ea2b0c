"""The fp64 twin: a graph rewritten as for float32, run in float64 against eager in float64.

Graph rewrites do not depend on the dtype, and in float64 a right one differs from eager by 1e-15,
a wrong one by far more than 1e-10. So the graph is captured with the dtypes the rules look for,
and only the replay is wide: every floating-point dtype in it becomes float64, and our ops run
their reference implementations.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._inductor.fx_passes.joint_graph import canonicalize_aten_ir_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from fuzz.program import Program, wide_arguments
from ipex_inductor import ops  # noqa: F401  registers the ipex:: ops
from ipex_inductor.errors import PassError
from ipex_inductor.passes import joint, prologue
from ipex_inductor.passes.packing import PACKERS
from ipex_inductor.passes.whole_ops import reduced_table
from ipex_inductor.report import GraphReport

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


@dataclass
class Captured:
    """One graph of AOT autograd with what it takes to compile it."""

    gm: torch.fx.GraphModule
    context: TracingContext
    mode: FakeTensorMode
    static: int  # how many inputs come first that are parameters or buffers
    forward_outputs: int
    joint: bool

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Where a pass runs: with the fake mode and the tracing context of this graph."""
        with V.set_fake_mode(self.mode), tracing(self.context), torch.set_grad_enabled(self.joint):
            yield

    def copy(self) -> torch.fx.GraphModule:
        """A graph to rewrite."""
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.gm.graph, {}))
        graph.output_node().meta = dict(self.gm.graph.output_node().meta)
        return torch.fx.GraphModule(self.gm, graph)


@dataclass
class Verdict:
    """What was seen of one program: events of the passes, and whether it could be trained."""

    events: list[Any] = field(default_factory=list)
    trained: bool = True


class _Captured(Exception):
    """Ends AOT autograd once it has the joint graph."""


def capture(program: Program, training: bool) -> Captured:
    """The graph that backend ipex would be given: inference, or joint forward and backward."""
    dtype = DTYPES[program.dtype]
    module = program.module(dtype)
    if training:
        module = _Copied(module)
    inputs = [_requiring(x, training) for x in program.inputs(dtype)]
    mode = FakeTensorMode()
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

    with V.set_fake_mode(mode), tracing(context), torch.set_grad_enabled(training):
        with suppress(_Captured):
            aot_module_simplified(
                module,
                inputs,
                inference,
                inference,
                partition,
                reduced_table(joint.WHOLE),
                keep_inference_input_mutations=True,
                inference_compiler=inference,
            )
        ((gm, count),) = found
        canonicalize_aten_ir_passes(gm)  # Inductor's, before any custom pass
    return Captured(gm, context, mode, static, count, training)


class _Copied(torch.nn.Module):
    """Results that share no memory with anything: AOT autograd has no bookkeeping to add."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        for name, value in module.named_parameters():
            self.register_parameter(name, value)
        for name, value in module.named_buffers():
            self.register_buffer(name, value)
        self._call = module._call

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(result.clone() for result in self._call(self, *inputs))


def rewrite(
    captured: Captured, off: frozenset[str] = frozenset()
) -> tuple[torch.fx.GraphModule, GraphReport]:
    """A copy of the captured graph after our joint pass, and what it reported."""
    gm, report = captured.copy(), GraphReport()
    with captured.compiling():
        try:
            joint.JointPass("", off, captured.joint, report, [])(gm.graph)
        except PassError as error:
            raise Mismatch(f"the pass failed: {error}") from error
    return gm, report


def replay(graph: torch.fx.Graph, inputs: Sequence[torch.Tensor]) -> list[Any]:
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
            _check_shape(node, env[node])
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


def _check_shape(node: torch.fx.Node, value: Any) -> None:
    said = node.meta.get("val")
    tensors = isinstance(said, torch.Tensor) and isinstance(value, torch.Tensor)
    if tensors and said.shape != value.shape:
        raise Mismatch(f"{node.format_node()} gives {tuple(value.shape)}, not {tuple(said.shape)}")


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
    module = program.module(torch.float64)
    weights = [*module.parameters(), *module.buffers()]
    inputs = program.inputs(torch.float64)
    values = [v.detach().clone() for v in (*weights, *inputs)]
    with torch.no_grad(), wide_default():
        want = module(*inputs)
        gm, report = rewrite(captured, off)
        verdict.events += report.events
        check_metadata(captured.gm.graph, gm.graph)
        got = replay(gm.graph, [v.clone() for v in values])
        compare(got, want, "result")
        compare_split(captured, gm, report, values, want)


def compare_split(
    captured: Captured,
    gm: torch.fx.GraphModule,
    report: GraphReport,
    values: list[torch.Tensor],
    want: Sequence[torch.Tensor],
) -> None:
    """The weight prologue's program and the graph that is left give the same."""
    with captured.compiling():
        fakes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        parts = prologue.split(gm, fakes, range(captured.static), report)
    if parts is None:
        return
    derived = [result for program in parts.programs for result in run_program(program, values)]
    compare(replay(parts.gm.graph, [*values, *derived]), want, "result behind the prologue")


def run_program(program: Any, values: Sequence[torch.Tensor]) -> list[Any]:
    """What the prologue computes, in float64 (`Program.run` would round to the weights' dtype)."""
    from ipex_inductor.passes import program as straight

    known: list[Any] = [values[i] for i in program.inputs]
    for step in program.steps:
        target = operator.getitem if step.op == "getitem" else straight._function(step.op)
        args, kwargs = tree_map(
            lambda v: known[v.index] if isinstance(v, straight.Ref) else v,
            (step.args, dict(step.kwargs)),
        )
        known.append(_call(target, args, kwargs))
    return [known[ref.index] for ref in program.outputs]


def judge_training(program: Program, verdict: Verdict, off: frozenset[str] = frozenset()) -> None:
    """The joint graph after the joint pass: results and the gradient of every leaf."""
    module = program.module(torch.float64)
    inputs = [_requiring(x, True) for x in program.inputs(torch.float64)]
    leaves = [*module.parameters(), *module.buffers(), *inputs]
    values = [v.detach().clone() for v in leaves]
    with wide_default():
        try:
            results = module(*inputs)
            wanted = [r for r in results if r.requires_grad]
            tangents = [_tangent(r, i) for i, r in enumerate(wanted)]
            trained = [v for v in leaves if v.requires_grad]
            if not wanted:
                raise Untrainable
            want = torch.autograd.grad(wanted, trained, tangents, allow_unused=True)
        except RuntimeError as error:  # a value needed for the gradient was changed in place
            raise Untrainable from error
        captured = capture(program, True)
        gm, report = rewrite(captured, off)
        verdict.events += report.events
        with torch.no_grad():
            check_metadata(captured.gm.graph, gm.graph)
            got = replay(gm.graph, [*values, *tangents])
    forward, backward = got[: captured.forward_outputs], got[captured.forward_outputs :]
    compare(forward[-len(results) :], [r.detach() for r in results], "result in training")
    grads = [g for g, leaf in zip(backward, leaves, strict=True) if leaf.requires_grad]
    text = str(program.steps)
    loosest = max((t for word, t in ROUNDED.items() if word in text), default=TOLERANCE)
    compare(grads, want, "gradient", loosest)


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


def check_metadata(before: torch.fx.Graph, after: torch.fx.Graph) -> None:
    """What leaves the graph keeps dtype, shape and strides, and is as many values as before."""
    if len(set(_leaves(after.output_node()))) < len(set(_leaves(before.output_node()))):
        raise Mismatch("two results became one tensor, which the caller may write")
    for number, (old, new) in enumerate(zip(*map(outputs_of, (before, after)), strict=True)):
        if describe(old) != describe(new):
            raise Mismatch(f"result {number} is {describe(new)}, not {describe(old)}")


def outputs_of(graph: torch.fx.Graph) -> list[Any]:
    """The fake values that leave the graph."""
    values = _leaves(graph.output_node())
    return [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in values]


def _leaves(output: torch.fx.Node) -> list[Any]:
    """What a graph returns, None where a gradient is missing."""
    return tree_leaves(output.args, is_leaf=lambda value: value is None)


def describe(value: Any) -> Any:
    """dtype, shape and the strides that mean something (not over one element, not of nothing)."""
    if not isinstance(value, torch.Tensor):
        return value
    sizes = [(n, s) for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]
    return value.dtype, tuple(value.shape), sizes if value.numel() else None


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
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
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

"""Straight-line programs over weights, as plain data, which the weight preprocessing runs."""

import contextlib
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ipex_inductor.runtime import openmp

CAST, PRODUCT, SCALED = "prims::convert_element_type", "aten::mul.Tensor", "scaled"
OURS, BLOCKS, KEPT = "ipex::", "ipex::blocks", "ipex::kept_weight"
WINOGRAD = "ipex::winograd_weight"
PACKS = ("mkldnn::_reorder_", KEPT)  # prefixes of the ops that pack by oneDNN
KNOWN = ("aten::", "prims::", "mkldnn::", OURS, "getitem")  # prefixes of ops that are no user's
SERIAL = (1 << 15) - 1  # the most elements for which torch starts no threads
PACKED_ALONE = 1 << 19  # the most elements packed by one thread, in 0.4 ms


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype).copy_(x)


def _scale(x: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` times `factors` in fp64, rounded once.

    Where each row has its own factor, it is computed by blocks of rows. Weights of ResNet-50 then
    take a fifth of the time: no new memory is touched for fp64, and no thread is waited for.
    """
    rows, formats = factors.numel(), [torch.contiguous_format]
    if x.dim() == 4:
        formats.append(torch.channels_last)
    blocks = (rows, *[1] * (x.dim() - 1)) == tuple(factors.shape) and x.shape[:1] == (rows,)
    if not (blocks and x.numel() and any(x.is_contiguous(memory_format=f) for f in formats)):
        return _cast(_cast(x, torch.float64) * factors, dtype)
    result = torch.empty_like(x, dtype=dtype)
    length = x.numel() // rows
    flat, flat_result = (t.as_strided((rows, length), (length, 1)) for t in (x, result))
    at_once = max(1, SERIAL // length)
    parts = (torch.split(t, at_once) for t in (flat, factors.reshape(rows, 1), flat_result))
    for part, row_factors, out in zip(*parts, strict=True):
        out.copy_(part.double().mul_(row_factors))
    return result


# Ops that torch implements in slow Python, or in several passes; these give equal bits and strides.
DIRECT: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    CAST: _cast,
    SCALED: _scale,
}


def _run_packing(run: "functools.partial[Any]") -> Any:
    """Run one of oneDNN's packing calls; small weights are packed by one thread.

    OneDNN would use all threads for any weight, however small.
    """
    small = run.args[0].numel() <= PACKED_ALONE
    with openmp.one_thread() if small else contextlib.nullcontext():
        return run()


@dataclass(frozen=True)
class Ref:
    """The value number `index`: first the program's inputs, then each step's result."""

    index: int


@dataclass(frozen=True)
class Step:
    """One call: the op's full name (or "getitem") and its arguments, with values as `Ref`."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Program:
    """The program `steps` over the graph inputs numbered `inputs`; `outputs` are derived tensors.

    `takes` describes the inputs: dtype, shape and strides, on which the steps may depend.
    `drops`: no other part of the graph reads the inputs, so their data may be freed afterwards.
    """

    inputs: tuple[int, ...]
    takes: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Ref, ...]
    drops: bool = False

    @functools.cached_property
    def text(self) -> str:
        """The text of the computation, without the graph: equal texts give equal results."""
        return repr((self.takes, self.steps, self.outputs))

    @functools.cached_property
    def is_known(self) -> bool:
        """True if all ops are torch's or ours; the schema of a user's op may be wrong."""
        return all(step.op.startswith(KNOWN) for step in self.steps)

    def run(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the derived tensors of these weights, in the order of `outputs`."""
        values: list[Any] = list(weights)
        # Inference tensors could not be written again outside of inference mode.
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
            for step, finished in zip(self._fused_steps, self._last_reads, strict=True):
                if step is None:
                    values.append(None)
                    continue
                kwargs = {name: _substitute_values(value, values) for name, value in step.kwargs}
                run = functools.partial(
                    _function(step.op), *_substitute_values(step.args, values), **kwargs
                )
                values.append(_run_packing(run) if step.op.startswith(PACKS) else run())
                del run, kwargs
                for index in finished:
                    values[index] = None
        return [values[ref.index] for ref in self.outputs]

    @functools.cached_property
    def _last_reads(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each step, the values that no later step reads and that are not results.

        Temporaries of a weight take several times its memory, so each is freed behind its reader.
        """
        seen = {ref.index for ref in self.outputs}
        last: list[tuple[int, ...]] = []
        for step in reversed(self._fused_steps):
            read = set(_read_by((step.args, step.kwargs))) if step else set()
            last.append(tuple(sorted(read - seen)))
            seen |= read
        return tuple(reversed(last))

    @functools.cached_property
    def _fused_steps(self) -> tuple[Step | None, ...]:
        """The steps, with upcast, scaling and rounding fused; None for steps that were fused."""
        plan: list[Step | None] = list(self.steps)
        taken: Counter[int] = Counter(ref.index for ref in self.outputs)
        for step in self.steps:
            taken.update(_read_by((step.args, step.kwargs)))

        def alone(value: Any, op: str) -> int | None:
            """Return the number of the step of `op` that gives `value` to one reader, or None."""
            number = value.index - len(self.inputs) if isinstance(value, Ref) else -1
            single = number >= 0 and taken[value.index] == 1 and self.steps[number].op == op
            return number if single and not self.steps[number].kwargs else None

        for at, step in enumerate(self.steps):
            product = alone(step.args[0], PRODUCT) if step.op == CAST and not step.kwargs else None
            if product is None:
                continue
            weight, factors = self.steps[product].args
            wide = alone(weight, CAST)
            if wide is None or self.steps[wide].args[1] != torch.float64:
                continue
            if isinstance(factors, Ref):
                plan[wide] = plan[product] = None
                plan[at] = Step(SCALED, (self.steps[wide].args[0], factors, step.args[1]), ())
        return tuple(plan)


def record(
    inputs: dict[torch.fx.Node, int],
    nodes: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
) -> Program:
    """Return the program of `nodes` in order; `inputs` maps placeholders to graph input numbers."""
    refs = {node: Ref(i) for i, node in enumerate([*inputs, *nodes])}

    def step(node: torch.fx.Node) -> Step:
        args, kwargs = map_aggregate((node.args, tuple(node.kwargs.items())), _substitute)
        name = "getitem" if node.target is operator.getitem else node.target.name()  # type: ignore[union-attr]
        return Step(name, args, kwargs)

    def _substitute(value: Any) -> Any:
        return refs[value] if isinstance(value, torch.fx.Node) else value

    return Program(
        tuple(inputs.values()),
        tuple(_description(node.meta["val"]) for node in inputs),
        tuple(map(step, nodes)),
        tuple(refs[node] for node in outputs),
    )


def _description(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"


def _read_by(argument: Any) -> Iterator[int]:
    """Yield the numbers of the values in `argument`."""
    if isinstance(argument, Ref):
        yield argument.index
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from _read_by(part)


def _substitute_values(argument: Any, values: Sequence[Any]) -> Any:
    """Return `argument` with the values of its `Ref`s; tuples may become lists."""
    if isinstance(argument, Ref):
        return values[argument.index]
    if isinstance(argument, (tuple, list)):
        return [_substitute_values(part, values) for part in argument]
    return argument


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    """Return the op called "namespace::name.overload" (or "namespace::name")."""
    if name in DIRECT:
        return DIRECT[name]
    if name.startswith(OURS):  # these modules are imported only where they are needed
        from ipex_inductor.ops.conv.winograd import transform_weight
        from ipex_inductor.ops.gemm.blocked import arrange_panels
        from ipex_inductor.templates.cpu.cached_primitives import laid_out

        # An op in Python imports Dynamo when it is called.
        for ours, function in (
            (BLOCKS, arrange_panels),
            (KEPT, laid_out),
            (WINOGRAD, transform_weight),
        ):
            if name.startswith(ours):
                return function
    path = name if "." in name else f"{name}.default"
    op: Callable[..., Any] = operator.attrgetter(path.replace("::", "."))(torch.ops)
    return op

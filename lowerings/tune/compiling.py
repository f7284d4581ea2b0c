"""The graph of a problem with one of its choices, as Inductor compiles it: begun, then waited for.

Inductor's workers compile the kernels of all graphs that are begun at once. The kernels of sizes
that vary are compiled as their graph is begun, for Dynamo compiles at the first call.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ipex_inductor import compat, lowerings
from ipex_inductor.autotune.measure import Run
from ipex_inductor.autotune.record import Choice, Problem, encode
from ipex_inductor.lowerings.common.calls import Call
from ipex_inductor.lowerings.problem.selector_hook import Choosing, Offer, choosing
from ipex_inductor.lowerings.problem.workload import function_of, mark
from ipex_inductor.lowerings.select import library
from ipex_inductor.lowerings.tune import resources

# What makes Inductor list its templates, and time nothing.
OPTIONS: dict[str, Any] = {"max_autotune": True, "shape_padding": False}
# What a graph with an op of ours is compiled by: templates may change more than the choice does.
USUALLY: dict[str, Any] = {"shape_padding": False}


@dataclass(frozen=True)
class Begun:
    """A graph whose kernels may still be compiling."""

    run: Run  # not before it was waited for
    wait: Callable[[], None]
    modules: Sequence[Any]

    def waited(self) -> "Begun":
        """The same, compiled. Raises what a kernel failed by."""
        self.wait()
        return self

    def takes(self) -> dict[str, int]:
        """What its templates take of a multiprocessor, when it is compiled."""
        return resources.taken(self.modules)


def compiled(problem: Problem, choice: Choice, inputs: Sequence[Tensor]) -> Run:
    """The problem's graph with that choice, called once. Raises as `begun` does."""
    graph = begun(problem, choice, inputs).waited()
    graph.run(inputs)
    return graph.run


def begun(problem: Problem, choice: Choice, inputs: Sequence[Tensor]) -> Begun:
    """The problem's graph with that choice. Raises `ValueError` if it is not to be had."""
    if problem.op in library.CALLS:
        return _called(problem, library.call_of(problem, choice), inputs)
    graph, offers = _lowered(problem, inputs, {encode(problem): choice})
    offer = offers.get(encode(problem))
    if offer is None or offer.taken != choice:
        raise ValueError("Inductor does not offer it any more")
    return graph


def offered(problem: Problem, inputs: Sequence[Tensor]) -> tuple[Begun, Offer]:
    """The graph with the choice that is usual, and what there is to choose from.

    Raises `ValueError` where there is no choice, or Inductor lowers another problem.
    """
    if problem.op in library.CALLS:
        calls = library.calls(problem)
        if len(calls) < 2:
            raise ValueError("nothing but Inductor's own may compute it")
        choices = tuple(call.choice for call in calls)
        return _called(problem, calls[0], inputs), Offer(problem, choices, choices[0])
    graph, offers = _lowered(problem, inputs, {})
    offer = offers.get(encode(problem))
    if offer is None:
        others = ", ".join(_named(o.problem) for o in offers.values()) or "nothing to choose from"
        raise ValueError(f"here it is lowered as {others}")
    return graph, offer


def lowered(
    problem: Problem,
    inputs: Sequence[Tensor],
    options: dict[str, Any],
    function: Callable[..., Tensor] | None = None,
    waits: bool = False,
) -> Begun:
    """The problem's graph, or that of `function`, as Inductor makes it of its own.

    `waits`: it is compiled when it comes, as must be where Inductor itself times its kernels.
    """
    with torch.no_grad(), compat.graph_caches_off(), resources.loaded() as modules:
        if problem.symbols:
            run = _dynamic(problem, inputs, options)
            run(*inputs)  # it compiles
            return Begun(_without_grad(run), _compiled, modules)
        put_off = nullcontext(_compiled) if waits else compat.kernels_put_off()
        with put_off as wait:
            run = static(function or function_of(problem), inputs, options)
    return Begun(_without_grad(run), wait, modules)


def _compiled() -> None:
    """Nothing is left to wait for."""


def _called(problem: Problem, call: Call, inputs: Sequence[Tensor]) -> Begun:
    """The graph with the op computed by `call`, and what that leaves of the epilogue by Inductor.

    Without max-autotune, under which a convolution of one pixel is a product to Inductor.
    """
    lowerings.register()
    if call.arrange is None:
        return lowered(problem, inputs, USUALLY, function_of(problem, call.body))
    arrange = function_of(replace(problem, epilogue=""), call.arrange)

    def function(weight: Tensor, *operands: Tensor) -> Tensor:
        return function_of(problem, functools.partial(call.body, weight))(*operands)

    known = Arranged(arrange)
    graph = lowered(problem, [known(inputs), *inputs], USUALLY, function)
    return Begun(
        lambda operands: graph.run([known(operands), *operands]), graph.wait, graph.modules
    )


class Arranged:
    """Weights as a call takes them, which the graphs of models have from a prologue: made once."""

    def __init__(self, arrange: Callable[..., Tensor]) -> None:
        self._arrange = arrange
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, operands: Sequence[Tensor]) -> Tensor:
        """What `arrange` makes of `operands`, whose second is the weight."""
        weight = operands[1]
        version, made = self._known.get(weight, (None, None))
        if version != weight._version:
            with torch.no_grad():
                made = self._arrange(*operands)
            self._known[weight] = weight._version, made
        assert isinstance(made, Tensor)
        return made


def _lowered(
    problem: Problem, inputs: Sequence[Tensor], selected: dict[bytes, Choice]
) -> tuple[Begun, dict[bytes, Offer]]:
    """The graph of the problem, and what Inductor offered for the ops in it."""
    now = Choosing(selected)
    with choosing(now):
        graph = lowered(problem, inputs, OPTIONS)
    return graph, now.offers


def _without_grad(run: Callable[..., Tensor]) -> Run:
    def call(operands: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return run(*operands)

    return call


def _named(problem: Problem) -> str:
    shapes = " ".join(f"{o.dtype}{list(o.shape)}{list(o.stride)}" for o in problem.operands)
    return f"{problem.op} {shapes}"


def static(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Tensor]:
    """Compiled without Dynamo, whose guards take as long as a small product."""
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(function)(*inputs)
    run: Any = compile_fx(gm, list(inputs), config_patches=options)
    return cast(Callable[..., Tensor], run)


def _dynamic(
    problem: Problem, inputs: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Tensor]:
    mark(problem, inputs)
    # What Dynamo compiles for one choice must not be taken for another, nor be compiled anew.
    torch._dynamo.config.error_on_recompile = True
    function = function_of(problem)

    def call(*operands: Tensor) -> Tensor:
        return function(*operands)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, fullgraph=True, options=options)

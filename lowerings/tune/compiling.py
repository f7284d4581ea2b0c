"""Compilation of a problem's graph with one of its candidates: started first, waited for later.

Inductor's workers compile the kernels of all started graphs in parallel. A graph of dynamic sizes
is compiled when it is started, because Dynamo compiles at the first call.
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

# Options with which Inductor lists its templates; the hook keeps it from timing them.
OPTIONS: dict[str, Any] = {"max_autotune": True, "shape_padding": False}
# Options for a graph with an `ipex::` op. Max-autotune is off, because it may change more than the
# choice does.
USUALLY: dict[str, Any] = {"shape_padding": False}


@dataclass(frozen=True)
class Begun:
    """Hold a graph whose kernels may still be compiling.

    Attributes:
        run: calls the compiled graph; only valid after `wait`.
        wait: waits for the kernels, and raises what one of them failed with.
        modules: generated modules of the graph.
    """

    run: Run
    wait: Callable[[], None]
    modules: Sequence[Any]

    def wait_compiled(self) -> "Begun":
        """Wait until the graph is compiled and return it; raise what a kernel failed with."""
        self.wait()
        return self

    def takes(self) -> dict[str, int]:
        """Return the multiprocessor resources that the templates of the compiled graph use."""
        return resources.resource_use(self.modules)


def compile_choice(problem: Problem, choice: Choice, inputs: Sequence[Tensor]) -> Run:
    """Compile the problem's graph with `choice`, call it once, and return it.

    Raises:
        ValueError: the choice is not available, see `start_choice`.
    """
    graph = start_choice(problem, choice, inputs).wait_compiled()
    graph.run(inputs)
    return graph.run


def start_choice(problem: Problem, choice: Choice, inputs: Sequence[Tensor]) -> Begun:
    """Start the compilation of the problem's graph with `choice`.

    Raises:
        ValueError: the choice is not available.
    """
    if problem.op in library.CALLS:
        return _start_call(problem, library.call_of(problem, choice), inputs)
    graph, offers = _lower_with_offers(problem, inputs, {encode(problem): choice})
    offer = offers.get(encode(problem))
    if offer is None or offer.taken != choice:
        raise ValueError("Inductor does not offer it any more")
    return graph


def list_candidates(problem: Problem, inputs: Sequence[Tensor]) -> tuple[Begun, Offer]:
    """Start the compilation with the default choice, and return the graph with the candidates.

    Raises:
        ValueError: there is only one candidate, or Inductor lowers another problem.
    """
    if problem.op in library.CALLS:
        calls = library.calls(problem)
        if len(calls) < 2:
            raise ValueError("nothing but Inductor's own may compute it")
        choices = tuple(call.choice for call in calls)
        return _start_call(problem, calls[0], inputs), Offer(problem, choices, choices[0])
    graph, offers = _lower_with_offers(problem, inputs, {})
    offer = offers.get(encode(problem))
    if offer is None:
        problems = (
            ", ".join(_describe(o.problem) for o in offers.values()) or "nothing to choose from"
        )
        raise ValueError(f"here it is lowered as {problems}")
    return graph, offer


def start_graph(
    problem: Problem,
    inputs: Sequence[Tensor],
    options: dict[str, Any],
    function: Callable[..., Tensor] | None = None,
    waits: bool = False,
) -> Begun:
    """Start the compilation of the problem's graph with Inductor's own lowerings.

    Args:
        problem: problem to compile.
        inputs: example operands.
        options: Inductor's options.
        function: compiled instead of the problem's op and epilogue, if given.
        waits: whether to return only when all is compiled, which is required where Inductor itself
            times its kernels.
    """
    with torch.no_grad(), compat.graph_caches_off(), resources.collect_modules() as modules:
        if problem.symbols:
            run = _dynamic(problem, inputs, options)
            run(*inputs)  # The first call compiles.
            return Begun(_without_grad(run), _skip_wait, modules)
        scheduling = nullcontext(_skip_wait) if waits else compat.kernels_put_off()
        with scheduling as wait:
            run = static(function or function_of(problem), inputs, options)
    return Begun(_without_grad(run), wait, modules)


def _skip_wait() -> None:
    """Return at once: the graph is already compiled."""


def _start_call(problem: Problem, call: Call, inputs: Sequence[Tensor]) -> Begun:
    """Start a graph in which `call` computes the op and Inductor the rest of the epilogue.

    Max-autotune is off, as under it Inductor treats a 1x1 convolution as a GEMM.
    """
    lowerings.register()
    if call.arrange is None:
        return start_graph(problem, inputs, USUALLY, function_of(problem, call.body))
    arrange = function_of(replace(problem, epilogue=""), call.arrange)

    def function(weight: Tensor, *operands: Tensor) -> Tensor:
        return function_of(problem, functools.partial(call.body, weight))(*operands)

    arranged = Arranged(arrange)
    graph = start_graph(problem, [arranged(inputs), *inputs], USUALLY, function)
    return Begun(
        lambda operands: graph.run([arranged(operands), *operands]), graph.wait, graph.modules
    )


class Arranged:
    """Cache the weight as a call arranges it, computed once for each version of the weight.

    In graphs of models this is constant-folded weight preprocessing.
    """

    def __init__(self, arrange: Callable[..., Tensor]) -> None:
        self._arrange = arrange
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, operands: Sequence[Tensor]) -> Tensor:
        """Return the arranged weight; the second of `operands` is the weight."""
        weight = operands[1]
        version, arranged = self._known.get(weight, (None, None))
        if version != weight._version:
            with torch.no_grad():
                arranged = self._arrange(*operands)
            self._known[weight] = weight._version, arranged
        assert isinstance(arranged, Tensor)
        return arranged


def _lower_with_offers(
    problem: Problem, inputs: Sequence[Tensor], selected: dict[bytes, Choice]
) -> tuple[Begun, dict[bytes, Offer]]:
    """Start the problem's graph, and return it with Inductor's offers for its ops."""
    choices = Choosing(selected)
    with choosing(choices):
        graph = start_graph(problem, inputs, OPTIONS)
    return graph, choices.offers


def _without_grad(run: Callable[..., Tensor]) -> Run:
    def call(operands: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return run(*operands)

    return call


def _describe(problem: Problem) -> str:
    shapes = " ".join(f"{o.dtype}{list(o.shape)}{list(o.stride)}" for o in problem.operands)
    return f"{problem.op} {shapes}"


def static(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Tensor]:
    """Compile `function` without Dynamo, whose guards take as long as a small GEMM."""
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(function)(*inputs)
    run: Any = compile_fx(gm, list(inputs), config_patches=options)
    return cast(Callable[..., Tensor], run)


def _dynamic(
    problem: Problem, inputs: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Tensor]:
    mark(problem, inputs)
    # Code that Dynamo compiled for one choice must not serve another, nor be recompiled.
    torch._dynamo.config.error_on_recompile = True
    function = function_of(problem)

    def call(*operands: Tensor) -> Tensor:
        return function(*operands)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, fullgraph=True, options=options)

"""A graph in two forms: on results precomputed from its weights, and on the plain weights.

The plain form is compiled when first needed. Weights that change at nearly every call, as in online
learning, would have their results computed for a single call each. Weights that another process or
library may write at any time have no results that could be relied upon.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ipex_inductor import compat
from ipex_inductor.reporting import decisions

if TYPE_CHECKING:
    from ipex_inductor.compiler.request import Request
    from ipex_inductor.passes.weights.derived import DerivedWeights
    from ipex_inductor.passes.weights.weight_snapshot import PlainGraph

Graph = Callable[..., Any]


def with_plain_graph(
    compiled: Graph,
    derived: "Sequence[DerivedWeights]",
    request: "Request",
    report: decisions.GraphReport,
    compile_request: "Callable[[Request], Graph]",
) -> Graph:
    """Return `compiled`, which switches to the plain form of its graph when its weights require it.

    Args:
        compiled: the graph on precomputed results.
        derived: precomputed weights of the graph; unless there is exactly one, there is no plain
            form.
        request: request of the graph.
        report: receives the decisions.
        compile_request: compiles a request for the plain form.
    """
    if (
        len(derived) != 1 or request.config.drop_plain_weights
    ):  # dropped plain weights cannot be read
        return compiled
    inputs = [
        node.meta.get("example_value") for node in request.gm.graph.find_nodes(op="placeholder")
    ]
    if any(value is None for value in inputs):
        return compiled
    config = replace(request.config, weight_prologue=False)
    plain = replace(request, config=config, example_inputs=inputs)
    forms = _TwoForms(
        compiled, derived[0], report, functools.partial(_compile, plain, compile_request)
    )
    derived[0].has_plain_graph = True

    @functools.wraps(compiled, updated=())
    def call(*args: Any) -> Any:
        return forms(*args)

    vars(call).update(getattr(compiled, "__dict__", {}))
    return call


@dataclass
class _Stay:
    """A model whose plain weights are read until they were unchanged for some calls."""

    resume: "weakref.WeakMethod[Callable[[], None]]"  # dies with a weight of the model
    calls: int
    read: bytes
    same: int = 0


class _TwoForms:
    """Call the graph on precomputed results, or its plain form while the weights keep changing."""

    def __init__(
        self,
        compiled: Graph,
        derived: "DerivedWeights",
        report: decisions.GraphReport,
        compile_plain: Callable[[], Graph],
    ) -> None:
        self._compiled, self._derived, self._report = compiled, derived, report
        self._compile_plain = compile_plain
        self._plain: Graph | None = None
        self._numbers: list[int] = []  # indices of the weights among the arguments
        self._stays: dict[tuple[int, ...], _Stay] = {}
        self._lock = threading.Lock()  # held while the plain form is compiled

    def __call__(self, *args: Any) -> Any:
        from ipex_inductor.passes.weights.weight_snapshot import PlainGraph

        plain = self._plain
        if plain is not None and self._stays and self._stays_plain(args):
            return plain(*args)
        grad = torch.is_grad_enabled()
        try:
            return self._compiled(*args)
        except PlainGraph as raised:
            request = raised.with_traceback(None)  # its frames hold outdated tensors
        torch._C._set_grad_enabled(grad)  # torch's own code around the graph may not restore it
        return self._begin_stay(args, request)(*args)

    def _stays_plain(self, args: tuple[Any, ...]) -> bool:
        from ipex_inductor.passes.weights.weight_reader import any_reader

        key = self._key(args)
        stay = self._stays.get(key)
        if stay is None:
            return False
        read = any_reader().read(tuple([args[n] for n in self._numbers]))
        if read != stay.read:
            stay.read, stay.same = read, 0
        stay.same += 1
        if stay.same <= stay.calls:
            return True
        self._stays.pop(key, None)
        if resume := stay.resume():
            resume()
        return False

    def _begin_stay(self, args: tuple[Any, ...], request: "PlainGraph") -> Graph:
        """Return the callable to use instead: the plain form, or the other if there is none."""
        from ipex_inductor.passes.weights.weight_reader import any_reader

        numbers = {id(value): number for number, value in enumerate(args)}
        if not all(id(weight) in numbers for weight in request.weights):
            return self._give_up("a weight is not an argument of the graph")
        with self._lock:
            plain = self._plain or self._try_compile_plain(request, numbers)
        if plain is None:
            return self._compiled
        for key in [key for key, stay in self._stays.items() if stay.resume() is None]:
            self._stays.pop(key, None)
        read = any_reader().read(request.weights)
        resume = weakref.WeakMethod(request.resume)
        self._stays[self._key(args)] = _Stay(resume, request.calls, read)
        return plain

    def _try_compile_plain(self, request: "PlainGraph", numbers: dict[int, int]) -> Graph | None:
        """Compile the plain form; return None, with a reported reason, if that fails."""
        message = f"{request}: the graph that reads plain weights runs"
        decisions.log.info("weights: %s", message)
        self._report.add("missed", "weight preprocessing", message)
        try:
            plain = self._compile_plain()
        except Exception as error:
            if compat.is_control_flow(error):
                raise
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        self._numbers = [numbers[id(weight)] for weight in request.weights]
        self._plain = plain
        return plain

    def _give_up(self, reason: str) -> Graph:
        message = (
            f"no graph that reads plain weights ({reason}): results are computed at each change"
        )
        decisions.warn_once(message)
        self._report.add("missed", "weight preprocessing", message)
        self._derived.has_plain_graph = False
        return self._compiled

    def _key(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple([id(args[n]) for n in (*self._numbers[:1], *self._numbers[-1:])])


def _compile(request: "Request", compile_request: "Callable[[Request], Graph]") -> Graph:
    """Compile the graph again, with the sizes that its guards fix.

    Raises:
        RuntimeError: if the graph has no tensor input, or would need a guard that Dynamo did not
            set.
    """
    from torch._guards import TracingContext, tracing

    modes = [v.fake_mode for v in request.example_inputs if hasattr(v, "fake_mode")]
    if not modes:
        raise RuntimeError("the graph has no tensor among its inputs")
    sizes = modes[0].shape_env
    guard_count = len(sizes.guards) if sizes is not None else 0
    with compat.compiling_alone(), tracing(TracingContext(modes[0])):
        compiled = compile_request(request)
    if sizes is not None and len(sizes.guards) > guard_count:
        raise RuntimeError("it needs sizes that the graph's guards leave open")
    return compiled

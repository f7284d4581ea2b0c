"""List the kernel candidates of a graph and select among them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ipex_inductor import compat
from ipex_inductor.compiler import compile_fx, graph_cache, inner_compile
from ipex_inductor.compiler.request import Request
from ipex_inductor.config import resolve
from ipex_inductor.reporting import decisions

if TYPE_CHECKING:
    from ipex_inductor.autotune.record import Problem
    from ipex_inductor.autotune.select import Selection
    from ipex_inductor.lowerings.common.sycl import Source
    from ipex_inductor.lowerings.problem.selector_hook import Offer


def select_kernels(
    request: Request, graph_report: decisions.GraphReport
) -> "dict[bytes, Selection]":
    """Return the kernels selected by records, timing or a predictor; none if that fails."""
    try:
        if not request.may_have_choices:
            return {}
        from ipex_inductor.lowerings.select import selection

        policy, watches = request.policy, request.config.autotune == "inductor"
        if watches or not selection.may_choose(policy, request.gm, request.devices):
            return {}
        learn = functools.partial(list_candidates, request)
        learn = compat.restore_counters()(learn)  # its rules count once, when the graph is compiled
        say = functools.partial(graph_report.add, "missed")
        return selection.settle(policy, request.digest(), learn, say)
    except Exception as error:
        if request.config.strict or compat.is_control_flow(error):
            raise
        graph_report.add("missed", "autotune", f"{type(error).__name__}: {error}")
        return {}


def problems_of(call: Callable[[], object], mode: str | None = None) -> "list[Problem]":
    """Return the problems with a choice of kernels in all graphs of `call`, which runs eagerly.

    Each problem occurs once, in the order met; backward graphs are included.

    Args:
        call: calls the model.
        mode: mode of torch.compile.
    """
    met: dict[bytes, Problem] = {}
    config = resolve(mode, {"strict": True}, compat.inductor_option_types())

    def learn(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from ipex_inductor.autotune.record import encode

        offers = list_candidates(compile_fx.rewrite_attention(Request(gm, example_inputs, config)))
        met.update((encode(o.problem), o.problem) for o in offers)
        return gm.forward

    with compat.dynamo_unchanged():
        torch.compile(call, backend=learn)()
    return list(met.values())


def sycl_kernels(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> "dict[Source, str]":
    """Return the SYCL candidate kernels of a graph for an Intel GPU, with their names.

    The graph is not lowered, as Triton would need to know that GPU.

    Args:
        gm: the graph.
        example_inputs: its inputs.
        mode: mode of torch.compile.
        options: options of torch.compile.
    """
    from ipex_inductor.lowerings.common.sycl import is_ours, source_for

    merged_options = {**(options or {}), "strict": True}
    config = resolve(mode, merged_options, compat.inductor_option_types())
    offers = list_candidates(
        compile_fx.rewrite_attention(Request(gm, example_inputs, config)), compat.read_inner
    )
    pairs = ((o.problem, choice) for o in offers for choice in o.choices if is_ours(choice))
    named = ((source_for(p, c), f"{p.op.split('.')[1]} {c.parameters['block']}") for p, c in pairs)
    return {source: name.strip() for source, name in named}


def list_candidates(
    request: Request, compile_inner: Callable[..., Any] = compat.lower_inner
) -> "list[Offer]":
    """Return the kernel candidates of a graph, forward and backward; the graph is only lowered."""
    from ipex_inductor.lowerings.problem.selector_hook import Choosing, choosing

    copy = inner_compile.copy_graph(request.gm)
    choosing_state = Choosing()
    options = compile_fx.LISTS_TEMPLATES | dict(request.config.inductor) | compat.LOWER_ONLY
    config = replace(request.config, inductor=tuple(options.items()))
    lowered = Request(copy, request.example_inputs, config)
    report = decisions.GraphReport()  # unused: everything is decided again when compiling
    off, at_once = compat.graph_caches_off(), compat.backward_at_once()
    with graph_cache.spare(), off, at_once, choosing(choosing_state):
        compile_fx.compile_request(lowered, {}, report, None, compile_inner)
    for node in copy.graph.nodes:
        # Dynamo's metadata holds weak references to parameters, which forbid swapping them.
        node.meta.clear()
    return [*choosing_state.offers.values()]

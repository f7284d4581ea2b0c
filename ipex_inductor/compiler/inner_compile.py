"""Inductor's inner compiler as this backend calls it: weight preprocessing, choices, CUDA graphs.

AOT autograd calls it for each graph, forward and backward, with what it found out about the graph.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from ipex_inductor import compat, lowerings
from ipex_inductor.compiler import progress
from ipex_inductor.compiler.compile_context import CompileContext
from ipex_inductor.errors import PassError
from ipex_inductor.reporting import decisions
from ipex_inductor.runtime import gc_pause

if TYPE_CHECKING:
    from ipex_inductor.autotune.record import Choice
    from ipex_inductor.lowerings.problem.selector_hook import Choosing
    from ipex_inductor.passes.weights.prologue import Split, SplitSettings

AS_WRITTEN = "ops of ours run as torch's ops"
log = decisions.log


def compile_graph(
    context: CompileContext,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    **kwargs: Any,
) -> Any:
    """Compile a graph with Inductor, in inference with weight preprocessing and CUDA graphs.

    Args:
        context: what all graphs of the request share.
        gm: the forward or backward graph.
        example_inputs: its inputs.
        kwargs: further arguments of the inner compiler, e.g. `is_inference` and
            `static_input_idxs`.
    """
    gc_pause.resume()
    parts = _split_or_gather(context, gm, example_inputs, kwargs)
    context.graph_report.show("compiled", gm.graph)
    if parts is not None:
        gm, example_inputs = parts.gm, parts.example_inputs
        kwargs["static_input_idxs"] = parts.static_input_idxs
    if context.only_reads:
        return context.compiler(gm, example_inputs, **kwargs)
    compat.check_has_cpp(gm)
    wrap = _find_capture_wrapper(context, gm, example_inputs, kwargs) if context.captures else None
    inner = _compile_inner(context, gm, example_inputs, kwargs)
    code = wrap(inner, context.graph_report) if wrap else inner
    if parts is None:
        return code
    events = tuple(context.graph_report.events)
    # Memory that a capture reads must stay.
    keeps = bool(kwargs.get("cudagraphs")) or code is not inner
    return context.join(code, parts.programs, parts.reads, keeps, parts.repeats, events=events)


def _compile_inner(
    context: CompileContext,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return Inductor's code of a graph with the selected kernels; report choices and timings."""
    backward = bool(kwargs.get("is_backward"))
    late = context.folder.enter_late() if context.folder and backward else nullcontext()
    compile_by = functools.partial(_compile_with, context, example_inputs, kwargs)
    with late, progress.show_progress(gm, example_inputs, context.config, backward):
        inner, choosing_state, why_not = _compile_by_choices(context, compile_by, gm, backward)
    _report_choices(context, choosing_state, why_not)
    _record_timings(context, choosing_state)
    context.graph_report.show("code", getattr(inner, "source_code", ""))
    return inner


def _compile_with(
    context: CompileContext,
    example_inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    graph: torch.fx.GraphModule,
    choices: "dict[bytes, Choice]",
) -> "tuple[Any, Choosing]":
    """Return the code of a graph with these choices, and what was offered and timed."""
    from ipex_inductor.lowerings.pointwise.loop_choices import choose_loops
    from ipex_inductor.lowerings.problem.selector_hook import Choosing, choosing
    from ipex_inductor.passes.correctness import in_place

    report, config = context.graph_report, context.config
    watches = config.autotune == "inductor"
    choosing_state = Choosing(choices, leaves=context.may_time, watches=watches)
    checked = compat.reinplacing_checked(functools.partial(in_place.unsafe, report))
    loops = choose_loops(config.rules_off, bool(kwargs.get("is_inference")), report)
    with choosing(choosing_state), loops, checked, compat.stores_in_blocks():
        return context.compiler(graph, example_inputs, **kwargs), choosing_state


def _split_or_gather(
    context: CompileContext,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> "Split | None":
    """Split weight preprocessing off a graph of inference; gather updates in one of training."""
    from ipex_inductor.passes.training import foreach

    if kwargs.get("is_inference"):  # in training, ops read plain weights
        weights = kwargs.get("static_input_idxs", ()) if context.prologue else ()
        return _split(context, gm, example_inputs, weights)
    if context.allows(foreach.NAME):
        foreach.gather(gm.graph, context.graph_report)
        gm.recompile()
    return None


def _split(
    context: CompileContext,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    weights: Sequence[int],
) -> "Split | None":
    """Return the weight preprocessing split off the graph, for this backend's kernels if available.

    Args:
        context: what all graphs of the request share.
        gm: the graph, rewritten in place.
        example_inputs: its inputs.
        weights: indices of the inputs that are weights.

    Raises:
        PassError: if a pass fails.
    """
    from ipex_inductor.passes.engine.packable import sparing
    from ipex_inductor.passes.weights.prologue import split

    report = context.graph_report
    settings = _split_settings(context)
    try:
        _fit_attention(context, gm.graph, settings)
        with nullcontext() if context.config.strict else sparing(report):
            parts = split(gm, example_inputs, weights, report, settings)
        # A package refers to weights by index, and leaves out unread ones itself.
        return parts.without_unread() if parts and not context.is_packaged else parts
    except Exception as error:
        raise PassError(
            "the weight preprocessing to be split off",
            f"{type(error).__name__}: {error}",
            'Please report it; options={"weight_prologue": False} avoids it.',
        ) from error


def _fit_attention(
    context: CompileContext, graph: torch.fx.Graph, settings: "SplitSettings"
) -> None:
    """Rewrite attention for this backend's kernels, or for products computed in fp32."""
    from ipex_inductor.passes.attention import decode_attention, decode_attention_gpu
    from ipex_inductor.passes.attention.short_attention import shorten
    from ipex_inductor.passes.weights import upcast

    report, why_not = context.graph_report, settings.why_not_blocked
    if context.allows(decode_attention.NAME):
        decode_attention_gpu.place_decoding(graph, report)
        if why_not:
            decode_attention.place_decoding(graph, report, why_not)
    upcast.widen_attention(graph, settings.narrow, report)
    if why_not:
        shorten(graph, report, why_not)


def _split_settings(context: CompileContext) -> "SplitSettings":
    """Return the kernels and the memory that weight preprocessing may use."""
    from ipex_inductor.lowerings.common import sycl
    from ipex_inductor.passes.weights import plain, upcast
    from ipex_inductor.passes.weights.prologue import SplitSettings

    config = context.config
    packaged = bool(context.level) or context.is_packaged
    why_no_blocks = why_no_primitives = None
    if config.blocked_products:
        why_no_blocks, why_no_primitives = _why_not_ours(packaged, context.graph_report)
    # Another machine may have another number of threads, on which torch's choice depends.
    is_local = not packaged and context.allows(plain.NAME)
    return SplitSettings(
        limit=config.weight_prologue_bytes,
        sycl=sycl.why_not if config.sycl == "cpu" else None,
        why_not_blocked=why_no_blocks,
        why_not_kept=why_no_primitives,
        narrow=upcast.dtypes(config.rules_off),
        drops=config.drop_plain_weights,
        why_plain=plain.why_plain if is_local else None,
        in_python=not torch._inductor.config.cpp_wrapper,
    )


def _compile_by_choices(
    context: CompileContext,
    compile_by: "Callable[[Any, dict[bytes, Choice]], tuple[Any, Choosing]]",
    gm: torch.fx.GraphModule,
    backward: bool,
) -> "tuple[Any, Choosing, str]":
    """Return the code of `gm`, its choices, and why a selected kernel was not used.

    If a selected template of Inductor's does not compile, the graph is compiled without such
    templates. The last attempt on a backward graph, for which nothing else can stand in, is to
    compile it in plain torch ops.

    Args:
        context: selections and report; with option `strict` the first error is raised.
        compile_by: compiles a graph with given choices.
        gm: the graph.
        backward: True for a backward graph.
    """
    choices = {problem: selection.choice for problem, selection in context.selected.items()}
    without_templates = {p: choice for p, choice in choices.items() if not is_listed(choice)}
    attempts = [("", choices)]  # what replaces the selected templates, and the choices
    if without_templates != choices:
        attempts.append(("the library's kernels", without_templates))
    if backward and any(map(lowerings.is_ours, gm.graph.nodes)):
        attempts.append((AS_WRITTEN, without_templates))
    graphs = [gm, *(copy_graph(gm) for _ in attempts[1:])]  # a compilation changes its graph
    why_not = "is not offered here"
    for graph, (fallback, attempted) in zip(graphs, attempts, strict=True):
        if fallback:
            log.warning("a selected template %s: %s instead", why_not, fallback)
        if fallback == AS_WRITTEN:
            reason = f"a template {why_not}: {fallback}"
            context.graph_report.add("missed", "kernels of ours", reason)
        try:
            with _as_torch_ops() if fallback == AS_WRITTEN else nullcontext():
                return *compile_by(graph, attempted), why_not
        except Exception as error:
            if graph is graphs[-1] or context.config.strict or compat.is_control_flow(error):
                raise
            why_not = f"does not compile ({type(error).__name__}: {str(error).strip()[:300]})"
    raise AssertionError("the last attempt compiles or raises")


@contextmanager
def _as_torch_ops() -> Iterator[None]:
    """Run this backend's ops as torch ops, without caches, whose keys do not contain this."""
    with compat.graph_caches_off(), lowerings.as_written():
        yield


def _find_capture_wrapper(
    context: CompileContext,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Callable[[Any, decisions.GraphReport], Any] | None:
    """Return what wraps Inductor's code of `gm` in a CUDA graph capture, or None with a report.

    A compilation changes `gm`, so it is inspected before.
    """
    from ipex_inductor.capture.code import wrap_code
    from ipex_inductor.capture.policy import NAME
    from ipex_inductor.capture.reasons import inputs_read, why_not

    if not kwargs.get("is_inference"):
        return None
    static, moving = inputs_read(gm, kwargs.get("static_input_idxs", ()))
    if reason := why_not(gm, example_inputs, moving):
        context.graph_report.add("missed", NAME, reason)
        return None
    return functools.partial(wrap_code, static=static, moving=moving)


def _why_not_ours(
    packaged: bool, graph_report: decisions.GraphReport
) -> tuple[Callable[[], str | None], Callable[[], str | None]]:
    """Return two functions: why CPU kernels, and why cached oneDNN primitives, are unavailable.

    Each gives None if they are available.

    Args:
        packaged: True for a package, which has the CPU kernels in its own code, and for other
            CPUs: the machine that runs the graph has them.
        graph_report: receives each reason once.
    """
    from ipex_inductor.lowerings.conv import cached_primitives
    from ipex_inductor.lowerings.gemm import blocked
    from ipex_inductor.passes.weights.cached_primitives import why_not_faster

    def report_once(name: str, find: Callable[[bool], str | None]) -> Callable[[], str | None]:
        @functools.cache
        def why_not() -> str | None:
            reason = find(packaged)
            if reason:
                graph_report.add("missed", name, reason)
            return reason

        return why_not

    def why_not_kept(packaged: bool) -> str | None:
        return why_not_faster() or cached_primitives.why_not(packaged)

    return report_once("kernels for CPUs", blocked.why_not), report_once(
        "kept primitives", why_not_kept
    )


def _record_timings(context: CompileContext, choosing_state: "Choosing") -> None:
    """Store the timings that Inductor measured in the autotune database."""
    from ipex_inductor.lowerings.select.selection import database_of, store_inductor_times

    try:
        database = database_of(context.config.autotune_database)
        if choosing_state.heard and database is not None:
            store_inductor_times(choosing_state.heard, database)
    except OSError as error:  # the compilation of a backward graph has no fallback
        context.graph_report.add("missed", "autotune", f"what was timed is not kept: {error}")


def _report_choices(context: CompileContext, choosing_state: "Choosing", why_not: str) -> None:
    """Report each choice of kernels; `why_not` says why a selected kernel was not used."""
    report = context.graph_report
    for key, offer in choosing_state.offers.items():
        selection = context.selected.get(key)
        if selection is None:
            reason = f"{offer.taken.name}: nothing is recorded of {len(offer.choices)} choices"
        elif selection.choice == offer.taken:
            reason = str(selection)
        else:
            reason = f"{offer.taken.name}: {selection.choice.name} ({selection.source}) {why_not}"
        report.add("choice", offer.problem.op, reason)
    if choosing_state.failure:
        report.add("missed", "autotune", choosing_state.failure)


def copy_graph(
    gm: torch.fx.GraphModule, change: Callable[[torch.fx.Graph], object] | None = None
) -> torch.fx.GraphModule:
    """Return a copy of the graph over the original tensors and modules, with parameter names kept.

    Args:
        gm: the graph.
        change: may rewrite the copied graph, except for its inputs, before code is generated from
            it.
    """
    graph = deepcopy(gm.graph)
    if change:
        change(graph)
    copy = torch.fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    names = "_param_name_to_source", "_dynamo_source"  # attributes that fx does not copy
    inputs = (g.find_nodes(op="placeholder") for g in (gm.graph, copy.graph))
    for original, twin in [(gm, copy), *zip(*inputs, strict=True)]:
        for name in names:
            if hasattr(original, name):
                setattr(twin, name, getattr(original, name))
    return copy


def is_listed(choice: "Choice") -> bool:
    """Return True for a template of Inductor's, which it lists only if an option is set."""
    return choice.kind == "template" and choice.name.startswith("inductor.")

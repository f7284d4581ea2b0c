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
from ipex_inductor.compiler import graph_cache, progress
from ipex_inductor.config import CompileConfig
from ipex_inductor.errors import PassError
from ipex_inductor.reporting import decisions
from ipex_inductor.runtime import gc_pause

if TYPE_CHECKING:
    from ipex_inductor.autotune.record import Choice
    from ipex_inductor.autotune.select import Selection
    from ipex_inductor.lowerings.problem.selector_hook import Choosing
    from ipex_inductor.passes.weights.prologue import Split

AS_WRITTEN = "ops of ours run as torch's ops"
# Replacements of the compiler that only lower or read a graph.
LEARNING = (compat.lower_inner, compat.read_inner)
log = decisions.log


def compile_graph(
    prologue: bool,
    captures: bool,
    config: CompileConfig,
    selected: "Mapping[bytes, Selection]",
    may_time: bool,
    graph_report: decisions.GraphReport,
    folder: graph_cache.Folder | None,
    compiler: Callable[..., Any],
    join: Callable[..., Any],
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    **kwargs: Any,
) -> Any:
    """Compile a graph with Inductor, in inference with weight preprocessing and CUDA graphs.

    Args:
        prologue: True if weight preprocessing is split off.
        captures: True if calls may be captured as CUDA graphs.
        config: options of the compilation.
        selected: selected kernels, by encoded problem.
        may_time: True if kernels may be timed.
        graph_report: receives the decisions of this compilation.
        folder: folder of Inductor's files of this graph; None: Inductor's own folder.
        compiler: Inductor's inner compiler, or its replacement.
        join: joins Inductor's code with the programs of the weight preprocessing.
        gm: the forward or backward graph.
        example_inputs: its inputs.
        kwargs: further arguments of the inner compiler, e.g. `is_inference` and
            `static_input_idxs`.
    """
    from ipex_inductor.passes.correctness import in_place
    from ipex_inductor.passes.training import foreach

    gc_pause.resume()
    parts = None
    if kwargs.get("is_inference"):  # in training, ops read plain weights
        weights = kwargs.get("static_input_idxs", ()) if prologue else ()
        on_other_cpus = folder is not None and folder.level is not None
        parts = _split(gm, example_inputs, weights, config, compiler, on_other_cpus, graph_report)
    elif not {"*", foreach.NAME} & config.rules_off:
        foreach.gather(gm.graph, graph_report)
        gm.recompile()
    graph_report.show("compiled", gm.graph)
    if parts is not None:
        gm, example_inputs = parts.gm, parts.example_inputs
        kwargs["static_input_idxs"] = parts.static_input_idxs
    if compiler in LEARNING:
        return compiler(gm, example_inputs, **kwargs)
    compat.check_has_cpp(gm)
    wrap = _find_capture_wrapper(gm, example_inputs, kwargs, graph_report) if captures else None
    late = folder.enter_late() if folder and kwargs.get("is_backward") else nullcontext()
    watches = config.autotune == "inductor"

    def compile_with(graph: Any, choices: "dict[bytes, Choice]") -> "tuple[Any, Choosing]":
        from ipex_inductor.lowerings.pointwise.channel_tiles import use_channel_tiles
        from ipex_inductor.lowerings.problem.selector_hook import Choosing, choosing

        choosing_state = Choosing(choices, leaves=may_time, watches=watches)
        checked = compat.reinplacing_checked(functools.partial(in_place.unsafe, graph_report))
        tiles = use_channel_tiles(config.rules_off, graph_report)
        with choosing(choosing_state), tiles, checked, compat.stores_in_blocks():
            return compiler(graph, example_inputs, **kwargs), choosing_state

    backward = bool(kwargs.get("is_backward"))
    with late, progress.show_progress(gm, example_inputs, config, backward):
        report_args = backward, config.strict, graph_report
        inner, choosing_state, why_not = _compile_by_choices(
            compile_with, gm, selected, *report_args
        )
    _report_choices(choosing_state, selected, why_not, graph_report)
    _record_timings(choosing_state, config, graph_report)
    graph_report.show("code", getattr(inner, "source_code", ""))
    code = wrap(inner, graph_report) if wrap else inner
    if parts is None:
        return code
    events = tuple(graph_report.events)
    # Memory that a capture reads must stay.
    keeps = bool(kwargs.get("cudagraphs")) or code is not inner
    return join(code, parts.programs, parts.reads, keeps, parts.repeats, events=events)


def _split(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    weights: Sequence[int],
    config: CompileConfig,
    compiler: Callable[..., Any],
    elsewhere: bool,
    graph_report: decisions.GraphReport,
) -> "Split | None":
    """Return the weight preprocessing split off the graph, for this backend's kernels if available.

    Args:
        gm: the graph, rewritten in place.
        example_inputs: its inputs.
        weights: indices of the inputs that are weights.
        config: options of the compilation.
        compiler: Inductor's inner compiler, or its replacement.
        elsewhere: True if the graph is compiled for all CPUs of an x86-64 level.
        graph_report: receives the decisions of this compilation.

    Raises:
        PassError: if a pass fails.
    """
    from ipex_inductor.lowerings.common import sycl
    from ipex_inductor.passes.attention import decode_attention
    from ipex_inductor.passes.attention.short_attention import shorten
    from ipex_inductor.passes.engine.packable import sparing
    from ipex_inductor.passes.weights import plain, upcast
    from ipex_inductor.passes.weights.prologue import split

    limit = config.weight_prologue_bytes
    why_no_sycl = sycl.why_not if config.sycl == "cpu" else None
    why_no_blocks = why_no_primitives = None
    if config.blocked_products:
        why_no_blocks, why_no_primitives = _why_not_ours(compiler, elsewhere, graph_report)
    try:
        narrow = upcast.dtypes(config.rules_off)
        if why_no_blocks and not {"*", decode_attention.NAME} & config.rules_off:
            decode_attention.place_decoding(gm.graph, graph_report, why_no_blocks)
        upcast.widen_attention(gm.graph, narrow, graph_report)
        if why_no_blocks:
            shorten(gm.graph, graph_report, why_no_blocks)
        # Another machine may have another number of threads, on which torch's choice depends.
        is_local = not (elsewhere or _is_packaged(compiler) or {"*", plain.NAME} & config.rules_off)
        why_plain = plain.why_plain if is_local else None
        settings = (
            limit,
            why_no_sycl,
            why_no_blocks,
            why_no_primitives,
            narrow,
            config.drop_plain_weights,
            why_plain,
        )
        in_python = not torch._inductor.config.cpp_wrapper
        with nullcontext() if config.strict else sparing(graph_report):
            parts = split(gm, example_inputs, weights, graph_report, *settings, in_python)
        # A package refers to weights by index, and leaves out unread ones itself.
        return parts.without_unread() if parts and not _is_packaged(compiler) else parts
    except Exception as error:
        raise PassError(
            "the weight preprocessing to be split off",
            f"{type(error).__name__}: {error}",
            'Please report it; options={"weight_prologue": False} avoids it.',
        ) from error


def _compile_by_choices(
    compile_by: "Callable[[Any, dict[bytes, Choice]], tuple[Any, Choosing]]",
    gm: torch.fx.GraphModule,
    selected: "Mapping[bytes, Selection]",
    backward: bool,
    strict: bool,
    graph_report: decisions.GraphReport,
) -> "tuple[Any, Choosing, str]":
    """Return the code of `gm`, its choices, and why a selected kernel was not used.

    If a selected template of Inductor's does not compile, the graph is compiled without such
    templates. The last attempt on a backward graph, for which nothing else can stand in, is to
    compile it in plain torch ops.

    Args:
        compile_by: compiles a graph with given choices.
        gm: the graph.
        selected: selected kernels, by encoded problem.
        backward: True for a backward graph.
        strict: True if the first error is raised, without another attempt.
        graph_report: receives the decisions of this compilation.
    """
    choices = {problem: selection.choice for problem, selection in selected.items()}
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
            graph_report.add("missed", "kernels of ours", f"a template {why_not}: {fallback}")
        try:
            with _as_torch_ops() if fallback == AS_WRITTEN else nullcontext():
                return *compile_by(graph, attempted), why_not
        except Exception as error:
            if graph is graphs[-1] or strict or compat.is_control_flow(error):
                raise
            why_not = f"does not compile ({type(error).__name__}: {str(error).strip()[:300]})"
    raise AssertionError("the last attempt compiles or raises")


@contextmanager
def _as_torch_ops() -> Iterator[None]:
    """Run this backend's ops as torch ops, without caches, whose keys do not contain this."""
    with compat.graph_caches_off(), lowerings.as_written():
        yield


def _find_capture_wrapper(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    graph_report: decisions.GraphReport,
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
        graph_report.add("missed", NAME, reason)
        return None
    return functools.partial(wrap_code, static=static, moving=moving)


def _why_not_ours(
    compiler: Callable[..., Any], elsewhere: bool, graph_report: decisions.GraphReport
) -> tuple[Callable[[], str | None], Callable[[], str | None]]:
    """Return two functions: why CPU kernels, and why cached oneDNN primitives, are unavailable.

    Each gives None if they are available. A package has the CPU kernels in its own code, and a
    graph for other CPUs (`elsewhere`) finds them on the machine that runs it.
    """
    from ipex_inductor.lowerings.conv import cached_primitives
    from ipex_inductor.lowerings.gemm import blocked
    from ipex_inductor.passes.weights.cached_primitives import why_not_faster

    packaged = elsewhere or _is_packaged(compiler)

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


def _is_packaged(compiler: Callable[..., Any]) -> bool:
    return compiler not in (compat.compile_inner, *LEARNING)


def _record_timings(
    choosing_state: "Choosing", config: CompileConfig, graph_report: decisions.GraphReport
) -> None:
    """Store the timings that Inductor measured in the autotune database."""
    from ipex_inductor.lowerings.select.selection import database_of, store_inductor_times

    try:
        database = database_of(config.autotune_database)
        if choosing_state.heard and database is not None:
            store_inductor_times(choosing_state.heard, database)
    except OSError as error:  # the compilation of a backward graph has no fallback
        graph_report.add("missed", "autotune", f"what was timed is not kept: {error}")


def _report_choices(
    choosing_state: "Choosing",
    selected: "Mapping[bytes, Selection]",
    why_not: str,
    graph_report: decisions.GraphReport,
) -> None:
    """Report each choice of kernels; `why_not` says why a selected kernel was not used."""
    for key, offer in choosing_state.offers.items():
        selection = selected.get(key)
        if selection is None:
            reason = f"{offer.taken.name}: nothing is recorded of {len(offer.choices)} choices"
        elif selection.choice == offer.taken:
            reason = str(selection)
        else:
            reason = f"{offer.taken.name}: {selection.choice.name} ({selection.source}) {why_not}"
        graph_report.add("choice", offer.problem.op, reason)
    if choosing_state.failure:
        graph_report.add("missed", "autotune", choosing_state.failure)


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

"""Inductor's inner compiler as a graph of ours gets it: behind the weight prologue, by choices.

AOT autograd calls it for each graph, forward and backward, with what it decided of it.
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
LEARNING = (compat.lower_inner, compat.read_inner)  # in the place of what compiles
log = decisions.log


def compiled(
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
    """Inductor's inner compiler, in inference behind the weight prologue and maybe captured."""
    from ipex_inductor.passes.correctness import in_place
    from ipex_inductor.passes.training import foreach

    gc_pause.resume()
    parts = None
    if kwargs.get("is_inference"):  # in training, our ops are on weights as they are
        weights = kwargs.get("static_input_idxs", ()) if prologue else ()
        elsewhere = folder is not None and folder.level is not None
        parts = _split(gm, example_inputs, weights, config, compiler, elsewhere, graph_report)
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
    wrap = _captured(gm, example_inputs, kwargs, graph_report) if captures else None
    late = folder.entered_late() if folder and kwargs.get("is_backward") else nullcontext()
    watches = config.autotune == "inductor"

    def by(graph: Any, choices: "dict[bytes, Choice]") -> "tuple[Any, Choosing]":
        from ipex_inductor.lowerings.pointwise.channel_tiles import tiled
        from ipex_inductor.lowerings.problem.selector_hook import Choosing, choosing

        now = Choosing(choices, leaves=may_time, watches=watches)
        checked = compat.reinplacing_checked(functools.partial(in_place.unsafe, graph_report))
        tiles = tiled(config.rules_off, graph_report)
        with choosing(now), tiles, checked, compat.stores_in_blocks():
            return compiler(graph, example_inputs, **kwargs), now

    backward = bool(kwargs.get("is_backward"))
    with late, progress.told(gm, example_inputs, config, backward):
        told = backward, config.strict, graph_report
        inner, now, why_not = _by_choices(by, gm, selected, *told)
    _say_choices(now, selected, why_not, graph_report)
    _keep_heard(now, config, graph_report)
    graph_report.show("code", getattr(inner, "source_code", ""))
    code = wrap(inner, graph_report) if wrap else inner
    if parts is None:
        return code
    events = tuple(graph_report.events)
    keeps = bool(kwargs.get("cudagraphs")) or code is not inner  # what a capture reads, stays
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
    """What is hoisted of the work on `weights`, for kernels of ours where they are to be had."""
    from ipex_inductor.lowerings.common import sycl
    from ipex_inductor.passes.attention.short_attention import shorten
    from ipex_inductor.passes.engine.packable import sparing
    from ipex_inductor.passes.weights import plain, upcast
    from ipex_inductor.passes.weights.prologue import split

    limit = config.weight_prologue_bytes
    in_sycl = sycl.why_not if config.sycl == "cpu" else None
    in_blocks = by_kept = None
    if config.blocked_products:
        in_blocks, by_kept = _why_not_ours(compiler, elsewhere, graph_report)
    try:
        narrow = upcast.dtypes(config.rules_off)
        upcast.widen_attention(gm.graph, narrow, graph_report)
        if in_blocks:
            shorten(gm.graph, graph_report, in_blocks)
        # What runs elsewhere may have another number of threads, of which torch's choice depends.
        here = not (elsewhere or _is_packaged(compiler) or {"*", plain.NAME} & config.rules_off)
        why_plain = plain.why_plain if here else None
        told = limit, in_sycl, in_blocks, by_kept, narrow, config.drop_plain_weights, why_plain
        in_python = not torch._inductor.config.cpp_wrapper
        with nullcontext() if config.strict else sparing(graph_report):
            parts = split(gm, example_inputs, weights, graph_report, *told, in_python)
        # A package knows weights by their numbers, and leaves out itself what is not read.
        return parts.without_unread() if parts and not _is_packaged(compiler) else parts
    except Exception as error:
        raise PassError(
            "the weight prologue to be split off",
            f"{type(error).__name__}: {error}",
            'Please report it; options={"weight_prologue": False} avoids it.',
        ) from error


def _by_choices(
    by: "Callable[[Any, dict[bytes, Choice]], tuple[Any, Choosing]]",
    gm: torch.fx.GraphModule,
    selected: "Mapping[bytes, Selection]",
    backward: bool,
    strict: bool,
    graph_report: decisions.GraphReport,
) -> "tuple[Any, Choosing, str]":
    """The code of `gm` by what is selected, its lists, and why a selection was not taken.

    Where a template of Inductor's does not compile, by what is no template of it; a backward, which
    nothing behind falls back for, then with ops of ours as they are written.
    """
    choices = {problem: selection.choice for problem, selection in selected.items()}
    proven = {p: choice for p, choice in choices.items() if not is_listed(choice)}
    ways = [("", choices), ("the library's kernels", proven)][: 1 + (proven != choices)]
    if backward and any(map(lowerings.is_ours, gm.graph.nodes)):
        ways.append((AS_WRITTEN, proven))
    graphs = [gm, *(copied(gm) for _ in ways[1:])]  # a compilation changes its graph
    why_not = "is not offered here"
    for graph, (instead, chosen) in zip(graphs, ways, strict=True):
        if instead:
            log.warning("a selected template %s: %s instead", why_not, instead)
        if instead == AS_WRITTEN:
            graph_report.add("missed", "kernels of ours", f"a template {why_not}: {instead}")
        try:
            with _as_written() if instead == AS_WRITTEN else nullcontext():
                return *by(graph, chosen), why_not
        except Exception as error:
            if graph is graphs[-1] or strict or compat.is_control_flow(error):
                raise
            why_not = f"does not compile ({type(error).__name__}: {str(error).strip()[:300]})"
    raise AssertionError("the last way compiles or raises")


@contextmanager
def _as_written() -> Iterator[None]:
    """Our ops are torch's; no cache keeps that, as its key says nothing of it."""
    with compat.graph_caches_off(), lowerings.as_written():
        yield


def _captured(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    graph_report: decisions.GraphReport,
) -> Callable[[Any, decisions.GraphReport], Any] | None:
    """What puts calls that may be captured around Inductor's code of `gm`, if there is no reason.

    A compilation changes `gm`, so it is looked at before.
    """
    from ipex_inductor.capture.code import around
    from ipex_inductor.capture.policy import NAME
    from ipex_inductor.capture.reasons import inputs_read, why_not

    if not kwargs.get("is_inference"):
        return None
    static, moving = inputs_read(gm, kwargs.get("static_input_idxs", ()))
    if reason := why_not(gm, example_inputs, moving):
        graph_report.add("missed", NAME, reason)
        return None
    return functools.partial(around, static=static, moving=moving)


def _why_not_ours(
    compiler: Callable[..., Any], elsewhere: bool, graph_report: decisions.GraphReport
) -> tuple[Callable[[], str | None], Callable[[], str | None]]:
    """What says why our kernels for CPUs, and oneDNN's kept primitives, are not to be had.

    A package has the former in its own code, and a graph that runs `elsewhere` finds them there.
    """
    from ipex_inductor.lowerings.conv import cached_primitives
    from ipex_inductor.lowerings.gemm import blocked
    from ipex_inductor.passes.weights.cached_primitives import why_not_faster

    packaged = elsewhere or _is_packaged(compiler)

    def asked(name: str, find: Callable[[bool], str | None]) -> Callable[[], str | None]:
        @functools.cache
        def why_not() -> str | None:
            reason = find(packaged)
            if reason:
                graph_report.add("missed", name, reason)
            return reason

        return why_not

    def why_not_kept(packaged: bool) -> str | None:
        return why_not_faster() or cached_primitives.why_not(packaged)

    return asked("kernels for CPUs", blocked.why_not), asked("kept primitives", why_not_kept)


def _is_packaged(compiler: Callable[..., Any]) -> bool:
    return compiler not in (compat.compile_inner, *LEARNING)


def _keep_heard(
    now: "Choosing", config: CompileConfig, graph_report: decisions.GraphReport
) -> None:
    from ipex_inductor.lowerings.select.selection import database_of, keep_heard

    try:
        database = database_of(config.autotune_database)
        if now.heard and database is not None:
            keep_heard(now.heard, database)
    except OSError as error:  # backward graphs are compiled outside of all that could fall back
        graph_report.add("missed", "autotune", f"what was timed is not kept: {error}")


def _say_choices(
    now: "Choosing",
    selected: "Mapping[bytes, Selection]",
    why_not: str,
    graph_report: decisions.GraphReport,
) -> None:
    """`why_not`: what became of a choice that was selected and is not there."""
    for key, offer in now.offers.items():
        known = selected.get(key)
        if known is None:
            reason = f"{offer.taken.name}: nothing is recorded of {len(offer.choices)} choices"
        elif known.choice == offer.taken:
            reason = str(known)
        else:
            reason = f"{offer.taken.name}: {known.choice.name} ({known.source}) {why_not}"
        graph_report.add("choice", offer.problem.op, reason)
    if now.failure:
        graph_report.add("missed", "autotune", now.failure)


def copied(
    gm: torch.fx.GraphModule, change: Callable[[torch.fx.Graph], object] | None = None
) -> torch.fx.GraphModule:
    """The same tensors and modules under a graph of its own, by which AOT knows parameters too.

    `change` may rewrite that graph, but for its inputs, before code is made of it.
    """
    graph = deepcopy(gm.graph)
    if change:
        change(graph)
    copy = torch.fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    names = "_param_name_to_source", "_dynamo_source"  # of which fx knows nothing
    inputs = (g.find_nodes(op="placeholder") for g in (gm.graph, copy.graph))
    for each, twin in [(gm, copy), *zip(*inputs, strict=True)]:
        for name in names:
            if hasattr(each, name):
                setattr(twin, name, getattr(each, name))
    return copy


def is_listed(choice: "Choice") -> bool:
    """Whether it is a template of Inductor's, which lists them only if it is told to."""
    return choice.kind == "template" and choice.name.startswith("inductor.")

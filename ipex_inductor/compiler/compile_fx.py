"""Inductor's `compile_fx` as a request of ours goes through it: with our passes, by choices."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ipex_inductor import compat
from ipex_inductor.compiler import graph_cache
from ipex_inductor.compiler import inner_compile as inner
from ipex_inductor.compiler.request import Request
from ipex_inductor.reporting import decisions

if TYPE_CHECKING:
    from ipex_inductor.autotune.select import Selection
    from ipex_inductor.passes.correctness.output_strides import OutputStrides
    from ipex_inductor.passes.joint import JointPass

# Without it Inductor offers no template. It moves more than that (layouts, sums of products), so it
# is set only where a template was selected, and what the user says of it counts.
LISTS_TEMPLATES: dict[str, Any] = {"max_autotune_gemm": True}


def reattended(request: Request, graph_report: decisions.GraphReport | None = None) -> Request:
    """The same with attention as torch's kernels like it: what is compiled, and its keys."""
    from ipex_inductor.passes.engine.source import attentions

    if not any(attentions(request.gm.graph)):
        return request
    from ipex_inductor.passes.attention import grouped_queries, masks

    report = graph_report or decisions.GraphReport()
    off, as_eager = request.config.rules_off, bool(request.option("fallback_random"))
    names = grouped_queries.found(request.gm.graph, report, off)
    if names:
        grouped = functools.partial(grouped_queries.change, names=names)
        request = replace(request, gm=inner.copied(request.gm, grouped))
    calls = masks.found(request.gm.graph, as_eager, report, off)
    if calls:
        unmasked = functools.partial(masks.change, calls=calls)
        request = replace(request, gm=inner.copied(request.gm, unmasked))
    return request


def compiled(
    request: Request,
    selected: "Mapping[bytes, Selection]",
    graph_report: decisions.GraphReport,
    folder: graph_cache.Folder | None,
    compile_inner: Callable[..., Any] | None = None,
    join: Callable[..., Any] | None = None,
) -> Any:
    """What `compile_fx` makes of it; where a package is made, `join` has the prologue's programs.

    `compile_inner`: in the place of Inductor's inner compiler.
    """
    from torch._functorch import config as functorch_config

    with compat.templates_compiled_when_used():
        from torch._inductor.compile_fx import compile_fx

    _register(request)
    request = _mended(request, graph_report)
    from ipex_inductor.passes.correctness.output_strides import OutputStrides
    from ipex_inductor.passes.weights.output_code import PrologueCode

    packaged = join is not None
    patches = _patches(request, selected, folder, packaged)
    prologue = _has_prologue(request, graph_report)
    strides = OutputStrides(
        graph_report, compat.as_pass_list(_setting(patches, "joint_custom_post_pass"))
    )
    joint = _joint_pass(
        request, selected, graph_report, folder, patches, packaged, prologue, strides
    )
    patches |= {"joint_custom_pre_pass": joint, "joint_custom_post_pass": strides}
    captures = request.may_capture and not packaged
    inner_compile = functools.partial(
        inner.compiled,
        prologue,
        captures,
        request.config,
        selected,
        request.may_time,
        graph_report,
        folder,
        compile_inner or compat.compile_inner,
        join or PrologueCode,
    )
    # Code of ours is saved whole by AOTAutogradCache; see passes/weights/output_code.py.
    with functorch_config.patch(bundled_autograd_cache=prologue or captures):
        return compile_fx(
            request.gm,
            request.example_inputs,
            inner_compile=inner_compile,
            config_patches=patches,
            decompositions=_decompositions(request, patches),
        )


def _mended(request: Request, graph_report: decisions.GraphReport) -> Request:
    """Return the request with torch's fused SGD in ops that store what they compute.

    Of steps that are not read as updates, as beside a GradScaler or other work.
    """

    def wrong(node: torch.fx.Node) -> bool:
        if node.target is not torch._fused_sgd_:
            return False
        params: Any = node.args[0]
        return any(compat.mended(param.meta.get("example_value")) for param in params)

    def change(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            node.target = compat.mended_sgd if wrong(node) else node.target

    if not any(map(wrong, request.gm.graph.nodes)):
        return request
    graph_report.add("fired", "fused SGD", "torch's kernel stores no whole vectors of 16 bits")
    return replace(request, gm=inner.copied(request.gm, change))


def _register(request: Request) -> None:
    from ipex_inductor import lowerings, ops  # noqa: F401  registers the ipex:: ops

    lowerings.register(sycl=request.runs_sycl)
    compat.name_system()


def _patches(
    request: Request,
    selected: "Mapping[bytes, Selection]",
    folder: graph_cache.Folder | None,
    packaged: bool,
) -> dict[str, Any]:
    """Inductor's options for this graph, but for our pass."""
    patches = dict(request.options)
    if folder:
        patches = graph_cache.NO_HEADERS | patches
    if _has_template(selected):
        patches = LISTS_TEMPLATES | patches
    if packaged:
        patches["freezing"] = False  # the weights of a package are its inputs, whatever is set
    level = folder.level if folder else None
    if level or not any(place.type == "cpu" for place in request.places):
        patches |= compat.any_host(request.gm)
    if level:
        named = request.option("cpp.threads") > 0  # by the user, for all that he runs it on
        patches |= {"cpp.march": level.march} if named else level.options
    return patches


def _setting(patches: Mapping[str, Any], name: str) -> Any:
    return patches.get(name, getattr(torch._inductor.config, name))


def _has_prologue(request: Request, graph_report: decisions.GraphReport) -> bool:
    """Whether work on weights alone is split off; the report has why it is not."""
    if request.sharded:
        graph_report.add("missed", "weight prologue", "FSDP gathers the weights for each call")
    return request.config.weight_prologue and not (request.training or request.sharded)


def _joint_pass(
    request: Request,
    selected: "Mapping[bytes, Selection]",
    graph_report: decisions.GraphReport,
    folder: graph_cache.Folder | None,
    patches: Mapping[str, Any],
    packaged: bool,
    prologue: bool,
    strides: "OutputStrides",
) -> "JointPass":
    """Our passes over the joint graph, after the user's."""
    from ipex_inductor.lowerings.select.library import Chooser
    from ipex_inductor.passes.joint import JointPass
    from ipex_inductor.passes.weights import upcast
    from ipex_inductor.passes.weights.sycl import DTYPES

    config = request.config
    others = DTYPES if config.sycl == "cpu" else upcast.dtypes(config.rules_off)
    # A package's C++ is wrapped later, and has no words for a library's fused convolutions either.
    wrapped = packaged or _setting(patches, "cpp_wrapper")
    no_calls = "cpp_wrapper: Inductor's own is kept" if wrapped else ""
    return JointPass(
        request.identity(selected, folder.level if folder else None),
        config.rules_off,
        request.training,
        graph_report,
        compat.as_pass_list(_setting(patches, "joint_custom_pre_pass")),
        Chooser(selected, no_calls, request.tables, guesses=config.sycl == "xpu"),
        others if prologue else frozenset(),
        strides,
    )


def _decompositions(request: Request, patches: Mapping[str, Any]) -> Any:
    """Return Inductor's table under this call's options without the ops that are kept whole.

    None for Inductor's own: what no pass decomposes again must not be kept whole.
    """
    from ipex_inductor.passes.engine.whole_ops import reduced_table
    from ipex_inductor.passes.joint import WHOLE

    if not _setting(patches, "use_joint_graph_passes"):
        return None
    # The table depends on options (`fallback_random`), which compile_fx sets later than this.
    with torch._inductor.config.patch(dict(request.options)):
        return reduced_table(WHOLE)


def _has_template(selected: "Mapping[bytes, Selection]") -> bool:
    return any(inner.is_listed(selection.choice) for selection in selected.values())

"""Run Inductor's `compile_fx` on a request, with the passes and kernel choices of this backend."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ipex_inductor import compat
from ipex_inductor.compiler import graph_cache
from ipex_inductor.compiler import inner_compile as inner
from ipex_inductor.compiler.compile_context import CompileContext
from ipex_inductor.compiler.first_call import start_first_call
from ipex_inductor.compiler.request import Request
from ipex_inductor.reporting import decisions

if TYPE_CHECKING:
    from ipex_inductor.autotune.select import Selection
    from ipex_inductor.passes.pass_context import PassSettings, WhyNot

# Inductor lists its templates only with this option. The option also changes layouts and sums of
# GEMMs, so it is set only if a template was selected; the user's own setting has priority.
LISTS_TEMPLATES: dict[str, Any] = {"max_autotune_gemm": True}


def rewrite_attention(
    request: Request, graph_report: decisions.GraphReport | None = None
) -> Request:
    """Return the request with attention rewritten for SDPA kernels; cache keys come from it."""
    from ipex_inductor.passes.engine.source import attentions

    if not any(attentions(request.gm.graph)):
        return request
    from ipex_inductor.passes.attention import grouped_queries, masks

    report = graph_report or decisions.GraphReport()
    off, as_eager = request.config.rules_off, bool(request.option("fallback_random"))
    names = grouped_queries.find_shared_keys(request.gm.graph, report, off)
    if names:
        grouped = functools.partial(grouped_queries.change, names=names)
        request = replace(request, gm=inner.copy_graph(request.gm, grouped))
    calls = masks.find_changes(request.gm.graph, as_eager, report, off)
    if calls:
        unmasked = functools.partial(masks.change, calls=calls)
        request = replace(request, gm=inner.copy_graph(request.gm, unmasked))
    return request


def compile_request(
    request: Request,
    selected: "Mapping[bytes, Selection]",
    graph_report: decisions.GraphReport,
    folder: graph_cache.Folder | None,
    compile_inner: Callable[..., Any] | None = None,
    join: Callable[..., Any] | None = None,
) -> Any:
    """Compile a request with `compile_fx` and return the callable.

    Args:
        request: graph, example inputs and options.
        selected: selected kernels, by encoded problem.
        graph_report: receives the decisions of this compilation.
        folder: folder of Inductor's files of this graph; None: Inductor's own folder.
        compile_inner: replaces Inductor's inner compiler.
        join: only when packaging: joins Inductor's code with the programs of the weight
        preprocessing.
    """
    from torch._functorch import config as functorch_config

    with compat.templates_compiled_when_used():
        from torch._inductor.compile_fx import compile_fx

    _register(request)
    request = _replace_fused_sgd(request, graph_report)
    from ipex_inductor.passes.weights.output_code import PrologueCode

    context = CompileContext(
        config=request.config,
        selected=selected,
        graph_report=graph_report,
        folder=folder,
        may_time=request.may_time,
        prologue=_has_prologue(request, graph_report),
        captures=request.may_capture and join is None,
        compiler=compile_inner or compat.compile_inner,
        join=join or PrologueCode,
    )
    patches = _patches(request, context)
    patches |= _passes(request, context, patches)
    # AOTAutogradCache saves this backend's code whole; see passes/weights/output_code.py.
    with functorch_config.patch(bundled_autograd_cache=context.prologue or context.captures):
        return compile_fx(
            request.gm,
            request.example_inputs,
            inner_compile=functools.partial(inner.compile_graph, context),
            config_patches=patches,
            decompositions=_decompositions(request, patches),
        )


def _replace_fused_sgd(request: Request, graph_report: decisions.GraphReport) -> Request:
    """Return the request with torch's fused SGD replaced by ops that store what they compute.

    Concerns optimizer steps that are not recognized as updates, e.g. with a GradScaler or mixed
    with other work.
    """

    def is_affected(node: torch.fx.Node) -> bool:
        if node.target is not torch._fused_sgd_:
            return False
        params: Any = node.args[0]
        return any(compat.needs_mended_sgd(param.meta.get("example_value")) for param in params)

    def change(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            node.target = compat.mended_sgd if is_affected(node) else node.target

    if not any(map(is_affected, request.gm.graph.nodes)):
        return request
    graph_report.add("fired", "fused SGD", "torch's kernel stores no whole vectors of 16 bits")
    return replace(request, gm=inner.copy_graph(request.gm, change))


def _register(request: Request) -> None:
    from ipex_inductor import lowerings, ops  # noqa: F401  registers the ipex:: ops

    lowerings.register(sycl=request.runs_sycl)
    compat.name_system()


def _patches(request: Request, context: CompileContext) -> dict[str, Any]:
    """Return Inductor's options for this graph, without the passes over the joint graph."""
    patches = dict(request.options)
    if context.folder:
        patches = graph_cache.NO_HEADERS | patches
    if _has_template(context.selected):
        patches = LISTS_TEMPLATES | patches
    if context.is_packaged:
        patches["freezing"] = False  # the weights of a package are its inputs in any case
    level = context.level
    if level or not any(place.type == "cpu" for place in request.places):
        patches |= compat.any_host(request.gm)
    if level:
        # The user's number of threads holds for all machines that run the graph.
        fixed_threads = request.option("cpp.threads") > 0
        patches |= {"cpp.march": level.march} if fixed_threads else level.options
    return patches


def _passes(
    request: Request, context: CompileContext, patches: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the passes over the joint graph, this backend's and the user's, as options."""
    from ipex_inductor.passes.correctness.output_strides import OutputStrides
    from ipex_inductor.passes.joint import JointPass

    users_pre = compat.as_pass_list(_setting(patches, "joint_custom_pre_pass"))
    users_post = compat.as_pass_list(_setting(patches, "joint_custom_post_pass"))
    strides = OutputStrides(context.graph_report, users_post)
    identity = request.identity(context.selected, context.level)
    settings = _pass_settings(request, context, patches)
    joint = JointPass(identity, settings, context.graph_report, users_pre, strides)
    return {"joint_custom_pre_pass": joint, "joint_custom_post_pass": strides}


def _setting(patches: Mapping[str, Any], name: str) -> Any:
    return patches.get(name, getattr(torch._inductor.config, name))


def _has_prologue(request: Request, graph_report: decisions.GraphReport) -> bool:
    """Return True if weight preprocessing is split off; report it if FSDP rules it out."""
    if request.is_sharded:
        graph_report.add("missed", "weight preprocessing", "FSDP gathers the weights for each call")
    return request.config.weight_prologue and not (request.training or request.is_sharded)


def _pass_settings(
    request: Request, context: CompileContext, patches: Mapping[str, Any]
) -> "PassSettings":
    """Return the settings of the passes over the joint graph.

    Args:
        request: graph and options.
        context: what all graphs of the request share.
        patches: Inductor's options of this graph.
    """
    from ipex_inductor.lowerings.select.library import Chooser
    from ipex_inductor.passes.pass_context import PassSettings
    from ipex_inductor.passes.weights import upcast
    from ipex_inductor.passes.weights.sycl import DTYPES

    config = request.config
    low_precision = DTYPES if config.sycl == "cpu" else upcast.dtypes(config.rules_off)
    # A library's fused convolutions cannot be called from C++.
    in_cpp = context.is_packaged or _setting(patches, "cpp_wrapper")
    no_calls = "cpp_wrapper: Inductor's own is used" if in_cpp else ""
    first_call = start_first_call(request) if context.is_for_use else None
    chooser = Chooser(
        context.selected,
        no_calls,
        request.tables,
        guesses=config.sycl == "xpu",
        first_call=first_call,
    )
    return PassSettings(
        rules_off=config.rules_off,
        training=request.training,
        choose=chooser,
        measure=chooser.measure,
        dtypes=low_precision if context.prologue else frozenset(),
        why_not_quantized=_why_not_quantized(context.is_packaged, context.level),
        shared_packing=config.shared_packing,
        balances=context.prologue and not context.is_packaged,
    )


def _why_not_quantized(packaged: bool, level: Any) -> "dict[str, WhyNot]":
    """Return what says why quantized kernels of a device are not available, by their kind.

    Args:
        packaged: True if an AOTInductor package is made.
        level: x86-64 level that the graph is compiled for, None for this CPU.
    """
    from ipex_inductor.lowerings.quant import fp8_weights, int8, weight_only

    return {
        "int8": functools.partial(int8.why_not, packaged or bool(level)),
        "fp8": functools.partial(fp8_weights.why_not, packaged),
        "weight only": functools.partial(weight_only.why_not, packaged=packaged),
    }


def _decompositions(request: Request, patches: Mapping[str, Any]) -> Any:
    """Return Inductor's decompositions for this call without the ops that are kept whole.

    None: Inductor's own table, as ops that no pass decomposes later must not be kept whole.
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

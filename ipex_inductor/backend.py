"""The Dynamo backend `ipex`: options, graph passes, then Inductor's `compile_fx`.

Options and passes are set per call: no global option, lowering of an aten op or user pass is
changed. docs/internals/hooks.md lists the hooks that stay in the process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

from ipex_inductor import compat
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.compiler import compile_fx as outer
from ipex_inductor.compiler import graph_cache, kernel_header, kernel_selection, progress, recording
from ipex_inductor.compiler.plain_graph import with_plain_graph
from ipex_inductor.compiler.request import Request
from ipex_inductor.config import CompileConfig, resolve, unknown
from ipex_inductor.errors import DeviceError, PassError, UnsupportedTorchError
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import warn_once
from ipex_inductor.runtime import gc_pause, openmp

if TYPE_CHECKING:
    from ipex_inductor.autotune.select import Selection
    from ipex_inductor.lowerings.optimizer.step import Launch

WRAPPER = "C++ wrapper"  # Inductor's name of C++ code that calls kernels
log = decisions.log
compat.register_log()
compat.mend_fused_sgd()
# Dynamo's registry imports this module when `torch.compile` is called.
compat.around_next_compile(gc_pause.postpone, gc_pause.resume)


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **_: Any,
) -> Any:
    """Compile one Dynamo graph: `torch.compile(model, backend="ipex", mode=..., options=...)`.

    An internal failure is logged as a warning, and plain Inductor compiles the graph (option
    `strict` raises instead).

    Args:
        gm: the graph.
        example_inputs: its inputs.
        mode: mode of `torch.compile`.
        options: options of this backend and of Inductor.

    Raises:
        OptionError: for an unknown option or a wrong value.
        DeviceError: for tensors without storage.
        CompilerNotFoundError: if a C++ compiler is needed and missing.
        UnsupportedTorchError: if this torch is not supported.
    """
    with gc_pause.pause(), openmp.unbind():
        return _compile_or_fall_back(gm, example_inputs, mode, options)


def _compile_or_fall_back(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: dict[str, Any] | None,
) -> Any:
    untested = compat.untested_reason()
    config = resolve(mode, options, compat.inductor_option_types())
    request = Request(gm, example_inputs, config)
    _check_devices(request)
    with progress.show_progress(gm, example_inputs, config):
        return _compile_request(request, untested)


def _compile_request(request: Request, untested: str | None) -> Any:
    """Compile with the passes of this backend, or with plain Inductor if they fail."""
    config = request.config
    if untested:
        warn_once(f"{untested}: plain Inductor compiles instead")
        return _compile_plain(request)
    _check_rules(config)
    if torch._inductor.config.freezing and not torch.is_grad_enabled():
        warn_once(
            "torch._inductor.config.freezing is on: Inductor freezes, without the passes of ipex"
        )
        return _compile_plain(request)
    try:
        return _compile_wrapped(request)
    except Exception as error:
        if config.strict or compat.is_control_flow(error) or compat.compiler_missing(error):
            raise (
                compat.compiler_missing(error) or _find_error(error, PassError) or error
            ) from error
        compiled = _compile_plain(request)  # raises errors of the model itself
        reason = _find_error(error, PassError) or f"{type(error).__name__}: {error}"
        with decisions.about(decisions.open_report()) as graph_report:
            graph_report.add("fallback", "plain Inductor", str(reason))
        return compiled


def _reset() -> None:
    """Reset this backend: `torch.compiler.reset()` calls this."""
    decisions.clear()
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


compile_graph.reset = _reset  # type: ignore[attr-defined]


def _compile_plain(request: Request) -> Any:
    from torch._inductor.compile_fx import compile_fx

    gc_pause.resume()
    options = dict(request.options)
    return compile_fx(request.gm, request.example_inputs, config_patches=options)


def _compile_wrapped(request: Request) -> Any:
    """Compile with cpp_wrapper if enabled, and without it if Inductor cannot."""
    graph_report = decisions.open_report()
    if not request.wraps_in_cpp:
        return _compile_ours(request, graph_report)
    try:
        return _compile_ours(request, graph_report, in_cpp=True)
    except Exception as error:
        if compat.is_control_flow(error):
            raise
        reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
        graph_report.events.clear()  # everything is decided again
        graph_report.add("missed", WRAPPER, f"{reason}: Python calls the kernels")
        return _compile_ours(request, graph_report)


def _compile_ours(
    request: Request, graph_report: decisions.GraphReport, in_cpp: bool = False
) -> Any:
    """Compile with the passes of this backend, through the graph cache.

    Args:
        request: graph and options.
        graph_report: receives the decisions.
        in_cpp: True for cpp_wrapper, which a graph for all CPUs of an x86-64 level never gets.
    """
    from ipex_inductor.passes.weights.derived import collecting

    recording.note(request.gm, request.training)
    request = outer.rewrite_attention(request, graph_report)
    optimizer_step = _compile_step(request, graph_report)
    if optimizer_step is not None:
        compat.tensors_unprinted()
        graph_report.publish()
        return optimizer_step
    selected = kernel_selection.select_kernels(request, graph_report)
    wrapped = request.wrapped_in_cpp() if in_cpp else request
    cache_folder = graph_cache.compiling(
        lambda level: (request if level else wrapped).key(selected, level=level),
        graph_report,
        gc_pause.resume,
        lambda: request.text,
        request.levels,
    )
    with decisions.about(graph_report), cache_folder as folder:
        hit = folder is not None and folder.files.outcome == "hit"
        if not hit:
            gc_pause.resume()
        for_level = folder is not None and folder.level is not None
        request = request if for_level else wrapped
        building = (
            nullcontext() if for_level else _build_early(request, own_files=folder is not None)
        )
        wrapping = compat.wrapping() if request.config.wrapped else nullcontext()
        with compat.no_early_workers() if hit else building, wrapping, collecting() as derived:
            compiled = outer.compile_request(request, selected, graph_report, folder)
    return with_plain_graph(compiled, derived, request, graph_report, _compile_plain_form)


def _compile_plain_form(request: Request) -> Any:
    """Compile a graph that reads plain weights, outside of Dynamo."""
    with gc_pause.pause(), openmp.unbind():
        return _compile_wrapped(request)


@contextmanager
def _build_early(request: Request, own_files: bool) -> Iterator[None]:
    """Build C++ code and headers in the background while the graph is traced on a CPU.

    Args:
        request: graph and options.
        own_files: True if the graph has a folder of its own, where Inductor has no header for it.
    """
    if any(device.type != "cpu" for device in request.devices):
        yield
        return
    if request.config.blocked_products and not request.training:
        from ipex_inductor.passes.weights import blocked

        blocked.begin_building(request.gm)
    use_best = None
    if own_files and not request.option("cpp_wrapper"):  # each kernel is a separate source
        kernel_header.use()
        use_best = kernel_header.begin if kernel_header.pays(request.gm) else None
    with compat.vectors_tried(use_best):
        yield


@dataclass(frozen=True)
class Ahead:
    """An exported graph to be compiled for other processes; its parameters stay attributes.

    `key` identifies its cache entry.
    """

    request: Request
    report: decisions.GraphReport

    @classmethod
    def of(
        cls,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        mode: str | None,
        options: Mapping[str, Any] | None,
    ) -> Self:
        """Return the graph with options of `torch.compile`.

        Args:
            gm: the graph.
            example_inputs: its inputs.
            mode: mode of `torch.compile`.
            options: options of `torch.compile`.

        Raises:
            OptionError: for an unknown option or a wrong value.
            UnsupportedTorchError: if this torch was not tested.
        """
        if untested := compat.untested_reason():
            raise UnsupportedTorchError("a tested version of torch", untested, "Install one.")
        config = resolve(mode, dict(options or {}), compat.inductor_option_types())
        _check_rules(config)
        report = decisions.open_report()
        return cls(outer.rewrite_attention(Request(gm, example_inputs, config), report), report)

    @cached_property
    def _selected_kernels(self) -> "dict[bytes, Selection]":
        return kernel_selection.select_kernels(self.request, self.report)

    @property
    def runs_users_code(self) -> bool:
        """Return True if the user's ops or passes take part, whose code the key does not cover."""
        return self.request.has_users_ops or self.request.has_users_pass

    def key(self, kind: str, problem: Mapping[str, Any]) -> Key:
        """Return the key of the cache entry.

        Args:
            kind: kind of the entry.
            problem: further facts that the code depends on.
        """
        return self.request.key(self._selected_kernels, kind, problem)

    def compile(self, compile_inner: Callable[..., Any], join: Callable[..., Any]) -> None:
        """Run all passes, then compile with `compile_inner`; errors are raised, without a fallback.

        Args:
            compile_inner: replaces Inductor's inner compiler.
            join: receives the programs of the weight preprocessing.
        """
        off = compat.graph_caches_off()
        with decisions.about(self.report), off, graph_cache.spare():
            outer.compile_request(
                self.request, self._selected_kernels, self.report, None, compile_inner, join
            )


def _compile_step(request: Request, graph_report: decisions.GraphReport) -> "Launch | None":
    """Return an optimizer step as kernel launches, without AOT autograd and Inductor.

    None if the graph is no step, or for a reason in the report.
    """
    from ipex_inductor.passes.engine.source import OPTIMIZER_STEP, is_step

    gm = request.gm
    if not is_step(gm) or {"*", OPTIMIZER_STEP} & request.config.rules_off:
        return None
    from ipex_inductor.lowerings.optimizer.step import launch
    from ipex_inductor.passes.optimizer import step
    from ipex_inductor.passes.optimizer.terms import UnreadError

    graph_report.show("traced", gm.graph)
    try:
        if request.has_users_pass:
            raise UnreadError("a custom pass of the user needs the graph")
        program, examples = step.program_of(gm)
        launched = launch(gm, program, examples, sycl=request.config.sycl == "cpu")
    except UnreadError as unread:
        launched = str(unread)
    if isinstance(launched, str):
        graph_report.add("missed", OPTIMIZER_STEP, launched)
        return None
    graph_report.source = "passes"
    graph_report.show("code", launched.source)
    rows = sum(map(len, program.updates.values()))
    kernels = len(program.updates)
    graph_report.add("fired", OPTIMIZER_STEP, f"{rows} rows of tensors, kernels: {kernels}")
    if launched.chosen:
        graph_report.add("choice", OPTIMIZER_STEP, launched.chosen)
    if program.device != "cpu" and request.options.get("triton.cudagraphs"):
        message = "launched in no CUDA graph, which would copy every gradient first"
        graph_report.add("choice", OPTIMIZER_STEP, message)
    return launched


def _check_devices(request: Request) -> None:
    if any(device.type == "meta" for device in request.devices):
        raise DeviceError(
            "parameters and inputs with storage",
            "a tensor on device 'meta'",
            "Give the model storage first: model.to_empty(device=...), then load its weights.",
        )


def _check_rules(config: CompileConfig) -> None:
    if not config.rules_off:
        return
    from ipex_inductor.lowerings.pointwise import channel_tiles, row_reductions
    from ipex_inductor.passes.attention import decode_attention, grouped_queries, masks
    from ipex_inductor.passes.engine.source import OPTIMIZER_STEP
    from ipex_inductor.passes.joint import RULE_NAMES, SWITCHES
    from ipex_inductor.passes.training import foreach
    from ipex_inductor.passes.weights import plain, upcast

    rules = channel_tiles, row_reductions, decode_attention, foreach, grouped_queries
    besides = {rule.NAME for rule in (*rules, plain, upcast)}
    rule_names = RULE_NAMES | SWITCHES | masks.NAMES | {OPTIMIZER_STEP} | besides
    for name in sorted(config.rules_off - rule_names - {"*"}):
        raise unknown("rule", name, rule_names)


def _find_error(error: BaseException | None, kind: type[PassError]) -> PassError | None:
    """Return the error of `kind` that Inductor or AOT autograd wrapped, None if there is none."""
    while error is not None and not isinstance(error, kind):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error

"""The Dynamo backend `ipex`: options, our passes, then Inductor's `compile_fx`.

Everything is per call: no global option, registry of Inductor's or user pass is changed.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

from ipex_inductor import collector, compat, decisions, graph_files, inner, openmp, recording
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.config import CompileConfig, resolve, unknown
from ipex_inductor.decisions import warn_once
from ipex_inductor.errors import DeviceError, PassError, UnsupportedTorchError
from ipex_inductor.request import Request

if TYPE_CHECKING:
    from ipex_inductor.autotune.record import Problem
    from ipex_inductor.autotune.select import Selection
    from ipex_inductor.lowerings.listed import Offer
    from ipex_inductor.lowerings.step import Launch
    from ipex_inductor.lowerings.sycl import Source

# Without it Inductor offers no template. It moves more than that (layouts, sums of products), so it
# is set only where a template was selected, and what the user says of it counts.
LISTS_TEMPLATES: dict[str, Any] = {"max_autotune_gemm": True}


log = decisions.log
compat.register_log()
# Dynamo's registry imports this module when `torch.compile` is called.
compat.around_next_compile(collector.put_off, collector.resume)


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **_: Any,
) -> Any:
    """Compile one Dynamo graph: `torch.compile(model, backend="ipex", mode=..., options=...)`.

    Takes our options and Inductor's alike. Raises `OptionError`, `DeviceError`,
    `CompilerNotFoundError` or `UnsupportedTorchError` for what the user can mend; a failure of our
    own is a warning, and the graph is compiled by plain Inductor (option `strict` raises instead).
    """
    with collector.paused(), openmp.unbound():
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
    if untested:
        warn_once(f"{untested}: plain Inductor compiles instead")
        return _compile_plain(request)
    _check_rules(config)
    if torch._inductor.config.freezing and not torch.is_grad_enabled():
        warn_once("torch._inductor.config.freezing is on: Inductor freezes, our passes stay out")
        return _compile_plain(request)
    try:
        return _compile_ours(request)
    except Exception as error:
        if config.strict or compat.is_control_flow(error) or compat.compiler_missing(error):
            raise compat.compiler_missing(error) or _find(error, PassError) or error from error
        compiled = _compile_plain(request)  # raises what is the model's fault
        reason = _find(error, PassError) or f"{type(error).__name__}: {error}"
        with decisions.about(decisions.open_report()) as graph_report:
            graph_report.add("fallback", "plain Inductor", str(reason))
        return compiled


def _reset() -> None:
    """What `torch.compiler.reset()` calls."""
    decisions.clear()
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


compile_graph.reset = _reset  # type: ignore[attr-defined]


def _compile_plain(request: Request) -> Any:
    from torch._inductor.compile_fx import compile_fx

    collector.resume()
    options = dict(request.options)
    return compile_fx(request.gm, request.example_inputs, config_patches=options)


def _compile_ours(request: Request) -> Any:
    recording.note(request.gm, request.training)
    graph_report = decisions.open_report()
    request = _unmasked(request, graph_report)
    stepped = _stepped(request, graph_report)
    if stepped is not None:
        compat.tensors_unprinted()
        graph_report.publish()
        return stepped
    selected = _settled(request, graph_report)
    found = graph_files.compiling(
        lambda level: request.key(selected, level=level),
        graph_report,
        collector.resume,
        lambda: request.text,
        request.levels,
    )
    with decisions.about(graph_report), found as folder:
        hit = folder is not None and folder.files.outcome == "hit"
        if not hit:
            collector.resume()
            if folder is None or folder.level is None:
                _begin_kernels(request)
        with compat.no_early_workers() if hit else nullcontext():
            return _compile_with(request, selected, graph_report, folder)


def _begin_kernels(request: Request) -> None:
    """The CPU's own kernels take seconds to compile, and so does tracing the graph."""
    on_cpu = all(device.type == "cpu" for device in request.devices)
    if request.config.blocked_products and on_cpu and not request.training:
        from ipex_inductor.passes import blocked

        blocked.begin_building(request.gm)


@dataclass(frozen=True)
class Ahead:
    """An exported graph to be compiled for other processes; its parameters stay attributes.

    `key` is what it is found by. Raises `OptionError`, `UnsupportedTorchError`.
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
        """With the options of `torch.compile`."""
        if untested := compat.untested_reason():
            raise UnsupportedTorchError("a torch that was tested", untested, "Install one.")
        config = resolve(mode, dict(options or {}), compat.inductor_option_types())
        _check_rules(config)
        report = decisions.open_report()
        return cls(_unmasked(Request(gm, example_inputs, config), report), report)

    @cached_property
    def _selected(self) -> "dict[bytes, Selection]":
        return _settled(self.request, self.report)

    @property
    def runs_users_code(self) -> bool:
        """Whether ops or passes of the user's take part, of whose code the key knows nothing."""
        return self.request.has_users_ops or self.request.has_users_pass

    def key(self, kind: str, problem: Mapping[str, Any]) -> Key:
        """What an entry of this kind is found by; `problem`: what else the code depends on."""
        return self.request.key(self._selected, kind, problem)

    def compile(self, compile_inner: Callable[..., Any], join: Callable[..., Any]) -> None:
        """All the passes; then `compile_inner` has the graph, and `join` the prologue's programs.

        Raises what fails: there is nobody to fall back on.
        """
        off = compat.graph_caches_off()
        with decisions.about(self.report), off, graph_files.spare():
            _compile_with(self.request, self._selected, self.report, None, compile_inner, join)


def _unmasked(request: Request, graph_report: decisions.GraphReport | None = None) -> Request:
    """The same with attention as kernels like it: what is compiled, and its keys."""
    from ipex_inductor.passes.source import attentions

    if not any(attentions(request.gm.graph)):
        return request
    from ipex_inductor.passes import grouped_queries, masks

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


def _stepped(request: Request, graph_report: decisions.GraphReport) -> "Launch | None":
    """The step of an optimizer as calls of our kernels, which neither AOT nor Inductor sees.

    None where the graph is no step, or for a reason that the report has.
    """
    from ipex_inductor.passes.source import OPTIMIZER_STEP, is_step

    gm = request.gm
    if not is_step(gm) or {"*", OPTIMIZER_STEP} & request.config.rules_off:
        return None
    from ipex_inductor.lowerings.step import launch
    from ipex_inductor.passes import step
    from ipex_inductor.passes.terms import UnreadError

    graph_report.show("traced", gm.graph)
    try:
        if request.has_users_pass:
            raise UnreadError("a pass of the user's is to see the graph")
        program, examples = step.program_of(gm)
        launched = launch(gm, program, examples, sycl=request.config.sycl == "cpu")
    except UnreadError as reason:
        launched = str(reason)
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
        said = "launched, in no CUDA graph, for which every gradient would be copied first"
        graph_report.add("choice", OPTIMIZER_STEP, said)
    return launched


def _settled(request: Request, graph_report: decisions.GraphReport) -> "dict[bytes, Selection]":
    """The kernels that records, timing or a model choose for this graph; none where that fails."""
    try:
        if not request.may_have_choices:
            return {}
        from ipex_inductor.lowerings import selection
        from ipex_inductor.lowerings.rivals import settled

        policy, watches = request.policy, request.config.autotune == "inductor"
        if watches or not selection.may_choose(policy, request.gm, request.devices):
            return {}
        learn = functools.partial(_offers, request)
        learn = compat.uncounted()(learn)  # its rules fire once, in what is compiled
        say = functools.partial(graph_report.add, "missed")
        return settled(selection.settle(policy, request.digest(), learn, say))
    except Exception as error:
        if request.config.strict or compat.is_control_flow(error):
            raise
        graph_report.add("missed", "autotune", f"{type(error).__name__}: {error}")
        return {}


def problems_of(call: Callable[[], object], mode: str | None = None) -> "list[Problem]":
    """What there is to choose in all that Dynamo sees of `call`, which runs eagerly meanwhile.

    Each once, in the order met; those of backward graphs too.
    """
    met: dict[bytes, Problem] = {}
    config = resolve(mode, {"strict": True}, compat.inductor_option_types())

    def learn(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from ipex_inductor.autotune.record import encode

        offers = _offers(_unmasked(Request(gm, example_inputs, config)))
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
    """All kernels in SYCL that there are to choose from in a graph for an Intel GPU, with names.

    It is not lowered, for which Triton would have to know that GPU.
    """
    from ipex_inductor.lowerings.sycl import is_ours, source_for

    given = {**(options or {}), "strict": True}
    config = resolve(mode, given, compat.inductor_option_types())
    offers = _offers(_unmasked(Request(gm, example_inputs, config)), compat.read_inner)
    pairs = ((o.problem, choice) for o in offers for choice in o.choices if is_ours(choice))
    named = ((source_for(p, c), f"{p.op.split('.')[1]} {c.parameters['block']}") for p, c in pairs)
    return {source: name.strip() for source, name in named}


def _offers(
    request: Request, compile_inner: Callable[..., Any] = compat.lower_inner
) -> "list[Offer]":
    """What there is to choose in a graph, forward and backward: it is lowered, and no more."""
    from ipex_inductor.lowerings.listed import Choosing, choosing

    copy = inner.copied(request.gm)
    now = Choosing()
    options = LISTS_TEMPLATES | dict(request.config.inductor) | compat.LOWER_ONLY
    config = replace(request.config, inductor=tuple(options.items()))
    lowered = Request(copy, request.example_inputs, config)
    report = decisions.GraphReport()  # nobody reads it: all of it is decided again
    off, at_once = compat.graph_caches_off(), compat.backward_at_once()
    with graph_files.spare(), off, at_once, choosing(now):
        _compile_with(lowered, {}, report, None, compile_inner)
    for node in copy.graph.nodes:
        node.meta.clear()  # Dynamo's notes hold weak references to parameters: no swapping those
    return [*now.offers.values()]


def _compile_with(
    request: Request,
    selected: "Mapping[bytes, Selection]",
    graph_report: decisions.GraphReport,
    folder: graph_files.Folder | None,
    compile_inner: Callable[..., Any] | None = None,
    join: Callable[..., Any] | None = None,
) -> Any:
    from torch._functorch import config as functorch_config

    with compat.templates_compiled_when_used():
        from torch._inductor.compile_fx import compile_fx

    from ipex_inductor import lowerings, ops  # noqa: F401  registers the ipex:: ops
    from ipex_inductor.lowerings.library import Chooser
    from ipex_inductor.passes.joint import WHOLE, JointPass
    from ipex_inductor.passes.output_code import PrologueCode
    from ipex_inductor.passes.sycl import DTYPES
    from ipex_inductor.passes.whole_ops import reduced_table

    lowerings.register(sycl=request.runs_sycl)
    compat.name_system()
    config = request.config
    patches = _patches(request, selected, folder, packaged=join is not None)

    def setting(name: str) -> Any:
        return patches.get(name, getattr(torch._inductor.config, name))

    wrapped = setting("cpp_wrapper")
    # A package's C++ is wrapped later, and has no words for a library's fused convolutions either.
    no_calls = "cpp_wrapper: Inductor's own is kept" if wrapped or join is not None else ""
    prologue = config.weight_prologue and not (request.training or wrapped or request.sharded)
    patches["joint_custom_pre_pass"] = JointPass(
        request.identity(selected, folder.level if folder else None),
        config.rules_off,
        request.training,
        graph_report,
        compat.as_pass_list(setting("joint_custom_pre_pass")),
        Chooser(selected, no_calls, request.tables, guesses=config.sycl == "xpu"),
        DTYPES if prologue and config.sycl == "cpu" else frozenset(),
    )
    if wrapped and config.weight_prologue:
        graph_report.add("missed", "weight prologue", "cpp_wrapper cannot take opaque inputs")
    if request.sharded:
        graph_report.add("missed", "weight prologue", "FSDP gathers the weights for each call")
    captures = request.may_capture and join is None
    inner_compile = functools.partial(
        inner.compiled,
        prologue,
        captures,
        config,
        selected,
        request.may_time,
        graph_report,
        folder,
        compile_inner or compat.compile_inner,
        join or PrologueCode,
    )
    # Code of ours is saved whole by AOTAutogradCache; see passes/output_code.py.
    with functorch_config.patch(bundled_autograd_cache=prologue or captures):
        return compile_fx(
            request.gm,
            request.example_inputs,
            inner_compile=inner_compile,
            config_patches=patches,
            # What nobody decomposes again must not be kept whole.
            decompositions=reduced_table(WHOLE) if setting("use_joint_graph_passes") else None,
        )


def _patches(
    request: Request,
    selected: "Mapping[bytes, Selection]",
    folder: graph_files.Folder | None,
    packaged: bool,
) -> dict[str, Any]:
    """Inductor's options for this graph, but for our pass."""
    patches = dict(request.options)
    if folder:
        patches = graph_files.NO_HEADERS | patches
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


def _has_template(selected: "Mapping[bytes, Selection]") -> bool:
    return any(inner.is_listed(selection.choice) for selection in selected.values())


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
    from ipex_inductor.passes import channels_last, foreach, grouped_queries, masks, moments, pool
    from ipex_inductor.passes.joint import RULE_NAMES
    from ipex_inductor.passes.source import OPTIMIZER_STEP

    ours = {m.NAME for m in (channels_last, foreach, grouped_queries, moments, pool)}
    known = RULE_NAMES | masks.NAMES | {OPTIMIZER_STEP} | ours
    for name in sorted(config.rules_off - known - {"*"}):
        raise unknown("rule", name, known)


def _find(error: BaseException | None, kind: type[PassError]) -> PassError | None:
    """The error of `kind` that Inductor or AOT autograd wrapped, if there is one."""
    while error is not None and not isinstance(error, kind):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error

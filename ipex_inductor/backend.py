"""The Dynamo backend `ipex`: options, our passes, then Inductor's `compile_fx`.

Everything is per call: no global option, registry of Inductor's or user pass is changed.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ipex_inductor import compat, decisions
from ipex_inductor.aot_cache.digest import digest_fields, source_digest
from ipex_inductor.config import CompileConfig, resolve, unknown
from ipex_inductor.errors import DeviceError, PassError
from ipex_inductor.target import current

log = decisions.log
compat.register_log()


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
    untested = compat.untested_reason()
    config = resolve(mode, options, compat.inductor_option_types())
    _check_devices(example_inputs)
    if untested:
        _warn_once(f"{untested}: plain Inductor compiles instead")
        return _compile_plain(gm, example_inputs, config)
    _check_rules(config)
    if torch._inductor.config.freezing and not torch.is_grad_enabled():
        _warn_once("torch._inductor.config.freezing is on: Inductor freezes, our passes stay out")
        return _compile_plain(gm, example_inputs, config)
    try:
        return _compile_ours(gm, example_inputs, config)
    except Exception as error:
        if config.strict or compat.is_control_flow(error) or compat.compiler_missing(error):
            raise compat.compiler_missing(error) or _find(error, PassError) or error from error
        compiled = _compile_plain(gm, example_inputs, config)  # raises what is the model's fault
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


def _compile_plain(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: CompileConfig
) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, config_patches=_inductor_options(config))


def _compile_ours(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: CompileConfig
) -> Any:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    from ipex_inductor import lowerings, ops  # noqa: F401  registers the ipex:: ops
    from ipex_inductor.passes.joint import WHOLE, JointPass
    from ipex_inductor.passes.whole_ops import reduced_table

    lowerings.register()
    patches = _inductor_options(config)
    training = _is_training(example_inputs)
    sharded = compat.is_sharded(gm)
    graph_report = decisions.open_report()
    user_passes = patches.get("joint_custom_pre_pass", torch._inductor.config.joint_custom_pre_pass)
    patches["joint_custom_pre_pass"] = JointPass(
        _identity(config, training, sharded, example_inputs),
        config.rules_off,
        training,
        graph_report,
        compat.as_pass_list(user_passes),
    )
    wrapped = patches.get("cpp_wrapper", torch._inductor.config.cpp_wrapper)
    prologue = config.weight_prologue and not training and not wrapped and not sharded
    if wrapped and config.weight_prologue:
        graph_report.add("missed", "weight prologue", "cpp_wrapper cannot take opaque inputs")
    if sharded:
        graph_report.add("missed", "weight prologue", "FSDP gathers the weights for each call")
    joint = patches.get("use_joint_graph_passes", torch._inductor.config.use_joint_graph_passes)
    # A split graph is saved whole by AOTAutogradCache; see passes/output_code.py.
    with functorch_config.patch(bundled_autograd_cache=prologue), decisions.about(graph_report):
        return compile_fx(
            gm,
            example_inputs,
            inner_compile=functools.partial(_compile_inner, prologue, config, graph_report),
            config_patches=patches,
            # What nobody decomposes again must not be kept whole.
            decompositions=reduced_table(WHOLE) if joint else None,
        )


def _compile_inner(
    prologue: bool,
    config: CompileConfig,
    graph_report: decisions.GraphReport,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    **kwargs: Any,
) -> Any:
    """Inductor's inner compiler, in inference behind the weight prologue."""
    from ipex_inductor.passes.output_code import PrologueCode
    from ipex_inductor.passes.prologue import split

    weights = kwargs.get("static_input_idxs", ()) if prologue else ()
    try:
        parts = (
            split(gm, example_inputs, weights, graph_report, config.weight_prologue_bytes)
            if kwargs.get("is_inference")
            else None  # in training, our ops are on weights as they are
        )
    except Exception as error:
        raise PassError(
            "the weight prologue to be split off",
            f"{type(error).__name__}: {error}",
            'Please report it; options={"weight_prologue": False} avoids it.',
        ) from error
    graph_report.show("compiled", gm.graph)
    if parts is None:
        inner = compat.compile_inner(gm, example_inputs, **kwargs)
    else:
        kwargs["static_input_idxs"] = parts.static_input_idxs
        inner = compat.compile_inner(parts.gm, parts.example_inputs, **kwargs)
    graph_report.show("code", getattr(inner, "source_code", ""))
    if parts is None:
        return inner
    events = tuple(graph_report.events)
    return PrologueCode(inner, parts.programs, bool(kwargs.get("cudagraphs")), events=events)


def _inductor_options(config: CompileConfig) -> dict[str, Any]:
    """Inductor's options for this call: those of the mode, then the user's own."""
    options = {**compat.mode_options(config.mode), **dict(config.inductor)}
    if options.pop("freezing", False):
        _warn_once(
            "option 'freezing' has no effect per call (Dynamo reads it globally before a backend "
            "is asked); the weight prologue does its work and keeps the caches"
        )
    return options


def _identity(
    config: CompileConfig, training: bool, sharded: bool, example_inputs: Sequence[Any]
) -> str:
    """What our part of the generated code depends on: sources, options and device."""
    devices = sorted({str(d.type) for d in _devices(example_inputs)} | {"cpu"})
    return digest_fields(
        {
            "sources": source_digest(),
            "rules_off": tuple(sorted(config.rules_off)),
            "weight_prologue": (config.weight_prologue, config.weight_prologue_bytes),
            "training": training,
            "sharded": sharded,
            "targets": tuple(current(device).arch for device in devices),
        }
    )


def _is_training(example_inputs: Sequence[Any]) -> bool:
    tensors = (t for t in example_inputs if isinstance(t, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _devices(example_inputs: Sequence[Any]) -> set[torch.device]:
    return {t.device for t in example_inputs if isinstance(t, torch.Tensor)}


def _check_devices(example_inputs: Sequence[Any]) -> None:
    if any(device.type == "meta" for device in _devices(example_inputs)):
        raise DeviceError(
            "parameters and inputs with storage",
            "a tensor on device 'meta'",
            "Give the model storage first: model.to_empty(device=...), then load its weights.",
        )


def _check_rules(config: CompileConfig) -> None:
    from ipex_inductor.passes.joint import RULE_NAMES

    for name in sorted(config.rules_off - RULE_NAMES - {"*"}):
        raise unknown("rule", name, RULE_NAMES)


def _find(error: BaseException | None, kind: type[PassError]) -> PassError | None:
    """The error of `kind` that Inductor or AOT autograd wrapped, if there is one."""
    while error is not None and not isinstance(error, kind):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)

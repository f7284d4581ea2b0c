"""`llm.optimize`: prepare a language model so that `generate` runs compiled code."""

import copy
import logging
import re
from typing import Any

import torch
from torch import nn

from ipex_inductor import frontend
from ipex_inductor.errors import ArgumentError, DeviceError
from ipex_inductor.frontend.checks import check
from ipex_inductor.frontend.notes import Notes
from ipex_inductor.llm import families, quantized, towers
from ipex_inductor.llm.forward import CompiledForward
from ipex_inductor.llm.generating import Generate, PrepareCache
from ipex_inductor.llm.steps import why_not_dropped

log = logging.getLogger("IPEX")

DEVICES = ("cpu", "cuda", "xpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOOKS = ("forward", "generate", "_prepare_cache_for_generation")
KNOB, DROP = "llm.optimize", "drop_plain_weights"


@torch.inference_mode(False)  # otherwise a copy would be of tensors that cannot be written later
def optimize(
    model: Any,
    optimizer: Any = None,
    dtype: torch.dtype = torch.float,
    inplace: bool = False,
    device: str | torch.device = "cpu",
    quantization_config: Any = None,
    qconfig_summary_file: str | None = None,
    low_precision_checkpoint: Any = None,
    sample_inputs: Any = None,
    deployment_mode: bool = True,
    cache_weight_for_large_batch: bool = False,
    *,
    drop_plain_weights: bool = False,
) -> Any:
    """Prepare the language model `model`: its `forward` and `generate` run compiled code.

    The class, the parameters' names and the results of `generate` stay as they are. Code is
    compiled when it is first needed. `ipex_inductor.report(model)` lists what was done.

    Args:
        model: a model of transformers that generates text. Others get `ipex_inductor.optimize`.
            With `low_precision_checkpoint` it may be on the device "meta", without memory.
        optimizer: the optimizer of a model that is trained.
        dtype: torch.float32 keeps the parameters; torch.bfloat16 or torch.float16 casts them.
        inplace: change the model itself, not a copy.
        device: "cpu", "cuda" or "xpu": the device that the parameters are on.
        quantization_config: weights alone, by `get_weight_only_quant_qconfig_mapping`.
        qconfig_summary_file: refused, with the way to static INT8.
        low_precision_checkpoint: a folder, a state dict of GPTQ, or a pair of a state dict and its
            quantization config.
        sample_inputs: accepted; shapes are read at the first call.
        deployment_mode: compile. False prepares the model and leaves its calls eager.
        cache_weight_for_large_batch: accepted in bf16; compiled code packs weights for each number
            of rows by itself.
        drop_plain_weights: on a CPU, release each plain weight once compiled code has it packed.
            The model then takes half of the memory; eager calls, `state_dict` and
            `save_pretrained` raise an error.

    Returns:
        The model. With an optimizer, or in training mode, the tuple (model, optimizer).

    Raises:
        ArgumentError: an argument is wrong.
        DeviceError: the model is on another device.
        WrappedModelError: the model is wrapped or compiled.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return model
    _check_arguments(model, dtype, device, cache_weight_for_large_batch, quantization_config)
    if model.training or optimizer is not None:
        return _train(model, optimizer, dtype, inplace)
    if inplace:
        _detach(model)
    is_empty = low_precision_checkpoint is not None and _is_on_meta(model)
    if not is_empty:
        check(model, None, None)
        _check_device(model, torch.device(device).type)
    family = families.find(model)
    given = (quantization_config, qconfig_summary_file, low_precision_checkpoint)
    if any(each is not None for each in given):
        model = quantized.quantize(model, *given, inplace=inplace)
    if low_precision_checkpoint is not None and not inplace:
        inplace = True  # the model is a copy already
        _detach(model)
    if is_empty:
        model = model.to(device)
    if family is None:
        log.info(
            "[NotSupported]llm.optimize: %s has no generate of transformers; it gets "
            "ipex_inductor.optimize",
            type(model).__name__,
        )
        return frontend.optimize(model, dtype=dtype, inplace=inplace)
    return _prepare(model, family, dtype, inplace, deployment_mode, drop_plain_weights)


def _prepare(
    model: Any,
    family: families.Family,
    dtype: torch.dtype,
    inplace: bool,
    deployment_mode: bool,
    drops: bool,
) -> Any:
    """Copy, cast and hook a model that generates text; the arguments are those of `optimize`."""
    notes = Notes(frozenset())
    earlier = getattr(model, "ipex_report", None)
    if not inplace:
        model = _copy(model, dtype)
        _detach(model)
    _cast(model, dtype, notes)
    if deployment_mode:
        if drops and (reason := why_not_dropped(model)):
            notes.record_rejected(DROP, reason)
            drops = False
        elif drops:
            notes.record_applied(DROP, "plain weights are released at the first calls")
        forward = CompiledForward(model, family, drops)
        vars(model)["forward"] = forward
        vars(model)["generate"] = Generate(model, forward)
        vars(model)["_prepare_cache_for_generation"] = PrepareCache(model, forward)
        if family.is_eager:
            notes.record_rejected(KNOB, family.reason)
        else:
            notes.record_applied(KNOB, "forward runs compiled, with static caches of a pool")
        if names := towers.compile_towers(model):
            notes.record_applied(KNOB, f"encoders run compiled: {', '.join(names)}")
    else:
        notes.record_skipped(KNOB, "deployment_mode=False: calls stay eager until compiled")
    model.ipex_report = notes.after(earlier)
    return model


def _train(model: Any, optimizer: Any, dtype: torch.dtype, inplace: bool) -> tuple[Any, Any]:
    """Return the model and its optimizer, prepared for training if both are there."""
    log.warning(
        "[NotSupported]llm.optimize prepares models for inference: a model with an optimizer gets "
        "ipex_inductor.optimize, one in training mode alone is returned as it is"
    )
    if optimizer is None:
        return model, None
    pair: tuple[Any, Any] = frontend.optimize(
        model, dtype=dtype, optimizer=optimizer, inplace=inplace
    )
    return pair


def _check_arguments(
    model: Any, dtype: Any, device: Any, cache_weight: bool, quantization_config: Any
) -> None:
    if not isinstance(model, nn.Module):
        actual = f"a {type(model).__name__}"
        raise ArgumentError("a torch.nn.Module", actual, "Pass the model itself.")
    if dtype not in DTYPES:
        expected = "torch.float32, torch.bfloat16 or torch.float16 as dtype"
        raise ArgumentError(expected, repr(dtype), "Quantized dtypes go to quantization_config.")
    if torch.device(device).type not in DEVICES:
        expected = "'cpu', 'cuda' or 'xpu' as device"
        raise ArgumentError(expected, repr(device), "Pass the device that the model is on.")
    if cache_weight and dtype is not torch.bfloat16 and quantization_config is None:
        raise ArgumentError(
            "dtype=torch.bfloat16 or weight-only quantization with cache_weight_for_large_batch",
            f"dtype={dtype}",
            "Leave cache_weight_for_large_batch out.",
        )


def _check_device(model: nn.Module, device: str) -> None:
    actual = next((p.device.type for p in model.parameters()), device)
    if actual != device:
        raise DeviceError(
            f"parameters on {device!r}, as `device` says",
            f"parameters on {actual!r}",
            f"Move the model first, model.to({device!r}), or pass device={actual!r}.",
        )


def _is_on_meta(model: nn.Module) -> bool:
    """Return whether a checkpoint gives all parameters of `model` their memory."""
    devices = {param.device.type for param in model.parameters()}
    return devices == {"meta"}


def _detach(model: nn.Module) -> None:
    """Remove the hooks of an earlier call."""
    towers.release_towers(model)
    forward = vars(model).get("forward")
    if isinstance(forward, CompiledForward):
        for name in HOOKS:
            vars(model).pop(name, None)
        if forward.own is not None:
            vars(model)["forward"] = forward.own


def _copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a deep copy whose parameters are cast one by one, so no full-precision copy exists."""
    memo: dict[int, Any] = {}
    for param in parameters_to_cast(model, dtype):
        cast = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
        memo[id(param)] = cast
    try:
        copied: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:
        advice = "llm.optimize(..., inplace=True) changes the model itself and needs no copy."
        reason = f"{type(error).__name__}: {error}"
        raise ArgumentError("a model that copy.deepcopy can copy", reason, advice) from error
    return copied


def _cast(model: nn.Module, dtype: torch.dtype, notes: Notes) -> None:
    """Cast parameters in place, one by one; buffers, such as rotary frequencies, keep theirs."""
    for param in parameters_to_cast(model, dtype):
        param.data = param.data.to(dtype)
    if dtype is not torch.float32:
        notes.record_applied("dtype", f"parameters are held in {dtype}, buffers keep their dtype")


def parameters_to_cast(model: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the parameters that `dtype` casts: not for fp32, nor what the model keeps in fp32."""
    if dtype is torch.float32:
        return []
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept = [word for name in names for word in getattr(model, name, None) or ()]
    pattern = re.compile("|".join(map(re.escape, kept)) or "(?!)")
    return [
        param
        for name, param in model.named_parameters()
        if param.is_floating_point() and param.dtype is not dtype and not pattern.search(name)
    ]

"""`ipex_inductor.optimize`: a model, and its optimizer, made ready in one call."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ipex_inductor.frontend import casting, folding, layout, training
from ipex_inductor.frontend import graph_mode as graphs
from ipex_inductor.frontend.checks import check
from ipex_inductor.frontend.copying import copy_with_model, warn_of_schedulers
from ipex_inductor.frontend.dropout import replace_dropout
from ipex_inductor.frontend.elsewhere import say_what_compiling_adds, say_who
from ipex_inductor.frontend.flow import Flow, differs, flow_of
from ipex_inductor.frontend.knobs import Knobs, resolve
from ipex_inductor.frontend.layout import disable_auto_channels_last, enable_auto_channels_last
from ipex_inductor.frontend.notes import Notes

__all__ = ["disable_auto_channels_last", "enable_auto_channels_last", "optimize"]


@torch.inference_mode(False)  # or the copies were tensors that nobody may write later
def optimize(
    model: Any,
    dtype: torch.dtype | None = None,
    optimizer: Any = None,
    level: str = "O1",
    inplace: bool = False,
    conv_bn_folding: bool | None = None,
    linear_bn_folding: bool | None = None,
    weights_prepack: bool | None = None,
    replace_dropout_with_identity: bool | None = None,
    optimize_lstm: bool | None = None,
    split_master_weight_for_bf16: bool | None = None,
    fuse_update_step: bool | None = None,
    auto_kernel_selection: bool | None = None,
    sample_input: Any = None,
    graph_mode: bool | None = None,
    concat_linear: bool | None = None,
) -> Any:
    """`model` made ready for inference (eval mode), or with its `optimizer` for training.

    Returns the model, or (model, optimizer): copies unless `inplace`, of the same classes. `level`
    O1 sets the knobs left at None; O0 sets none.
    `dtype`: torch.bfloat16 or torch.float16 casts what gains by it; call the model under autocast.
    `sample_input`: a tensor, tuple or dict of arguments that show how `forward` is called; copies
    run on it, and what folds by it is right for calls that take the same way. `graph_mode`:
    compiled with backend `ipex`. `ipex_inductor.report(model)`: what was done, and what not and
    why. Load checkpoints before folding for inference.

    Raises `PhaseError`, `LevelError`, `MixedDevicesError`, `WrappedModelError`, `ArgumentError`.
    """
    knobs = resolve(
        level,
        {
            "conv_bn_folding": conv_bn_folding,
            "linear_bn_folding": linear_bn_folding,
            "weights_prepack": weights_prepack,
            "replace_dropout_with_identity": replace_dropout_with_identity,
            "optimize_lstm": optimize_lstm,
            "split_master_weight_for_bf16": split_master_weight_for_bf16,
            "fuse_update_step": fuse_update_step,
            "auto_kernel_selection": auto_kernel_selection,
            "graph_mode": graph_mode,
            "concat_linear": concat_linear,
        },
    )
    if isinstance(model, torch.jit.ScriptModule):
        return _pair(model, optimizer)
    check(model, dtype, optimizer)
    notes = Notes(knobs.asked)
    compiled = graphs.is_wanted(model, graph_mode)
    if not inplace:
        warn_of_schedulers(optimizer, notes)
        model, optimizer = copy_with_model(model, optimizer)
    if dtype is torch.float32:
        casting.say_low(model, notes)
    layout.lay_out(model, optimizer, level, notes)
    say_who(model, knobs, compiled, notes)
    if optimizer is None:
        _prepare_inference(model, dtype, sample_input, knobs, notes)
        say_what_compiling_adds(model, compiled, notes)
    else:
        if sample_input is not None:
            notes.missed("sample_input", "it takes effect in inference only")
        training.train(model, optimizer, dtype, knobs, notes)
    graphs.switch(model, compiled, knobs, notes)
    model.ipex_report = notes.after(getattr(model, "ipex_report", None))
    return _pair(model, optimizer)


def _prepare_inference(
    model: nn.Module, dtype: torch.dtype | None, sample_input: Any, knobs: Knobs, notes: Notes
) -> None:
    if "replace_dropout_with_identity" in knobs:
        replace_dropout(model, notes)
    if folding.is_wanted(model, knobs):
        flow = _flow(model, sample_input, knobs, notes)
        folding.fold_batch_norms(model, flow, knobs, notes)
    elif sample_input is not None:
        notes.left("sample_input", "nothing to fold; graphs see the shapes when they are compiled")
    if dtype in casting.HALF:
        casting.cast(model, dtype, notes)


def _flow(model: nn.Module, sample_input: Any, knobs: Knobs, notes: Notes) -> Flow:
    flow = flow_of(model, sample_input, folding.is_watched)
    if sample_input is None:
        return flow

    def fold(copied: nn.Module) -> None:
        folding.fold_batch_norms(copied, flow, knobs, Notes(None))

    reason = flow.reason or differs(model, sample_input, flow, fold)
    if not reason:
        notes.done("sample_input", "run on copies, to see what may fold in calls like it")
        return flow
    notes.missed("sample_input", reason)
    return replace(flow_of(model, None, folding.is_watched), unseen=reason)


def _pair(model: Any, optimizer: Any) -> Any:
    return model if optimizer is None else (model, optimizer)

"""`ipex_inductor.optimize`: prepare a model, and its optimizer, in one call."""

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


@torch.inference_mode(False)  # otherwise the copies would be tensors that cannot be written later
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
    """Prepare `model` for inference (eval mode), or with its `optimizer` for training.

    Copies are returned unless `inplace`, of unchanged classes. Level O1 sets the knobs left at
    None; O0 sets none. `ipex_inductor.report(model)` lists what was done, what was not, and why.
    Load checkpoints before folding for inference.

    Args:
        model: the model.
        dtype: torch.bfloat16 or torch.float16 casts the parameters that gain by it; call the model
            under autocast.
        optimizer: the optimizer of a model in training mode, else None.
        level: "O0" or "O1".
        inplace: change the model and the optimizer themselves.
        conv_bn_folding: fold batch norms into convolutions, in inference.
        linear_bn_folding: fold batch norms into linear layers, in inference.
        weights_prepack: lay weights out for oneDNN; compiled graphs do it.
        replace_dropout_with_identity: replace dropouts by `nn.Identity`, in inference.
        optimize_lstm: run `nn.LSTM` on oneDNN's kernel; torch does it.
        split_master_weight_for_bf16: keep the low halves of fp32 master weights, in training.
        fuse_update_step: fuse the optimizer's step, in training.
        auto_kernel_selection: measure kernels; graphs in mode max-autotune do it.
        sample_input: a tensor, tuple or dict of arguments that show how `forward` is called; copies
            run on it, and a fold that relies on it is right for calls that take an equal path.
        graph_mode: compile with backend `ipex`.
        concat_linear: join linear layers; compiled graphs do it.

    Returns:
        The model, or (model, optimizer) if there is an optimizer.

    Raises:
        PhaseError: the optimizer does not fit the model's mode.
        LevelError: there is no such level.
        MixedDevicesError: parameters are on devices of several types.
        WrappedModelError: the model is wrapped or compiled.
        ArgumentError: an argument is wrong in another way.
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
            notes.record_rejected("sample_input", "it takes effect in inference only")
        training.train(model, optimizer, dtype, knobs, notes)
    graphs.switch(model, compiled, knobs, notes)
    model.ipex_report = notes.after(getattr(model, "ipex_report", None))
    return _pair(model, optimizer)


def _prepare_inference(
    model: nn.Module, dtype: torch.dtype | None, sample_input: Any, knobs: Knobs, notes: Notes
) -> None:
    """Replace dropouts, fold batch norms and cast parameters, as the knobs say.

    Args:
        model: the model, changed in place.
        dtype: the dtype to cast to; others than bf16 and fp16 cast nothing.
        sample_input: arguments that show how `forward` is called.
        knobs: the knobs in force.
        notes: the report.
    """
    if "replace_dropout_with_identity" in knobs:
        replace_dropout(model, notes)
    if folding.is_wanted(model, knobs):
        flow = _flow(model, sample_input, knobs, notes)
        folding.fold_batch_norms(model, flow, knobs, notes)
    elif sample_input is not None:
        notes.record_skipped(
            "sample_input", "nothing to fold; graphs see the shapes when they are compiled"
        )
    if dtype in casting.HALF:
        casting.cast(model, dtype, notes)


def _flow(model: nn.Module, sample_input: Any, knobs: Knobs, notes: Notes) -> Flow:
    """Return the flow of the sample, or of plain sequentials if the sample cannot be used.

    The sample's flow counts only if the folded copy gives an equal result on it.
    """
    flow = flow_of(model, sample_input, folding.is_watched)
    if sample_input is None:
        return flow

    def fold(copied: nn.Module) -> None:
        folding.fold_batch_norms(copied, flow, knobs, Notes(None))

    reason = flow.reason or differs(model, sample_input, flow, fold)
    if not reason:
        notes.record_applied("sample_input", "run on copies, to see what may fold in calls like it")
        return flow
    notes.record_rejected("sample_input", reason)
    return replace(flow_of(model, None, folding.is_watched), unseen=reason)


def _pair(model: Any, optimizer: Any) -> Any:
    return model if optimizer is None else (model, optimizer)

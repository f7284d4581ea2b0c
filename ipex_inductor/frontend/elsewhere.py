"""Report of what IPEX did in the model and torch or backend `ipex` do now."""

from torch import nn

from ipex_inductor.frontend.dropout import KNOB as DROPOUT
from ipex_inductor.frontend.knobs import Knobs
from ipex_inductor.frontend.notes import Notes

COMPILE = "graph_mode=True, or torch.compile(model, backend='ipex')"
TUNE = "graph_mode=True, or torch.compile(model, backend='ipex', mode='max-autotune')"
TORCH, GRAPH, TUNED = "torch", "graph", "tuned graph"

# What handles each knob on a CPU, and how.
CPU = {
    "optimize_lstm": (TORCH, "torch runs nn.LSTM on oneDNN's kernel by itself"),
    "weights_prepack": (GRAPH, "backend ipex lays weights out for oneDNN in inference"),
    "concat_linear": (GRAPH, "the rule linear|linear of backend ipex joins layers on few rows"),
    "auto_kernel_selection": (TUNED, "Inductor measures kernels in mode max-autotune"),
}
ANY = {"concat_linear": CPU["concat_linear"]}

# The messages that users of IPEX know for its GPUs.
XPU = {
    "weights_prepack": "Weight Prepack and Sample Input are both disabled on XPU. The Onednn "
    "Layout is automatically applied.",
    "optimize_lstm": "For XPU, the optimize_lstm(replace lstm with ipex_lstm) is unsupported, so "
    "disable it",
    "auto_kernel_selection": "Auto Kernel Selection feature is not supported on XPU, disabled.",
}


def say_who(model: nn.Module, knobs: Knobs, compiled: bool, notes: Notes) -> None:
    """Note, for each knob that the frontend does not handle, what handles it, or why none does."""
    elsewhen = knobs.out_of_phase("training" if model.training else "inference")
    for knob, phase in elsewhen.items():
        notes.record_rejected(knob, f"it takes effect in {phase} only")
    device = next((p.device.type for p in model.parameters()), "cpu")
    owners = CPU if device == "cpu" else ANY
    for knob in sorted((knobs.on & CPU.keys()) - elsewhen.keys()):
        owner, how = owners.get(knob, ("", f"it concerns oneDNN on CPUs, not {device}"))
        if owner == TORCH or (owner and compiled):
            notes.record_skipped(knob, how)
        elif owner == GRAPH:  # compiled graphs do it whatever the knob says, so nothing is refused
            notes.record_skipped(knob, f"{how}, once the model is compiled: {COMPILE}")
        else:
            reason = f"{how}: {TUNE}" if owner else how
            notes.record_rejected(knob, reason, text=XPU.get(knob, "") if device == "xpu" else "")


def say_what_compiling_adds(model: nn.Module, compiled: bool, notes: Notes) -> None:
    """Note that the model is no faster than before, if so, and that compiling makes it faster.

    Dropouts replaced by identities save a call each, and no arithmetic.
    """
    if not compiled and not notes.report.count("fired").keys() - {DROPOUT}:
        what = f"optimize alone makes this {type(model).__name__} no faster in its dtype"
        notes.hint("graph_mode", f"{what}: its operations are fused when compiled, by {COMPILE}")

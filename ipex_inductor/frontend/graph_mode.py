"""Graph mode: the model itself runs compiled, still of its own class."""

from torch import nn

from ipex_inductor.frontend.knobs import Knobs
from ipex_inductor.frontend.notes import Notes

KNOB = "graph_mode"


def is_wanted(model: nn.Module, given: bool | None) -> bool:
    """Whether the user asks for it, now or when `model` was last optimized."""
    report = getattr(model, "ipex_report", None)
    return bool(given) if given is not None or report is None else KNOB in report.count("fired")


def compile_model(model: nn.Module, knobs: Knobs, notes: Notes) -> None:
    """Have calls of `model` run through backend `ipex`, compiled at the first one.

    torch leaves compiled code out of copies and pickles: those run eagerly until compiled again.
    """
    mode = "max-autotune" if "auto_kernel_selection" in knobs else None
    model.compile(backend="ipex", mode=mode)
    notes.done(KNOB, "backend ipex" + f", mode {mode}" * bool(mode))

"""Graph mode: the model runs compiled and keeps its class."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ipex_inductor import compat
from ipex_inductor.frontend.knobs import Knobs
from ipex_inductor.frontend.notes import Notes
from ipex_inductor.runtime import gc_pause

KNOB = "graph_mode"
MARK = "_ipex_graph_mode"  # on the model: copies and pickles keep it


def is_wanted(model: nn.Module, requested: bool | None) -> bool:
    """Return whether the user wants graph mode, now or when `model` was last optimized."""
    return is_on(model) if requested is None else requested


def switch(model: nn.Module, on: bool, knobs: Knobs, notes: Notes) -> None:
    """Make calls of `model` run through backend `ipex`, compiled at the first one, or eagerly.

    torch leaves compiled code out of copies and pickles: they run eagerly until compiled again.
    """
    if on:
        mode = "max-autotune" if "auto_kernel_selection" in knobs else None
        with gc_pause.pause():  # the first call of `compile` imports Dynamo
            model.compile(backend="ipex", mode=mode)
        model._compiled_call_impl = _unless_traced(model._compiled_call_impl, model._call_impl)
        vars(model)[MARK] = True
        how = f"backend ipex{f', mode {mode}' * bool(mode)}; copies run eagerly until compile()"
        notes.record_applied(KNOB, how)
    elif is_on(model):
        model._compiled_call_impl = None
        del vars(model)[MARK]
        notes.record_applied(KNOB, "off again")


def _unless_traced(compiled: Any, eager: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compiled`, except under torch.jit and torch.fx, which trace the eager code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (eager if compat.is_traced_by_others() else compiled)(*args, **kwargs)

    return call


def is_on(model: nn.Module) -> bool:
    """Return whether `optimize` left `model`, or the original of this copy, in graph mode."""
    return MARK in vars(model)

"""AOT autograd: when it compiles backward graphs, what it says of inputs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """Backward graphs are compiled with their forward, and not when they are first needed."""
    from torch._functorch import config as functorch_config

    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        yield


@contextlib.contextmanager
def backward_too() -> Iterator[None]:
    """Backward graphs are compiled with their forward, under the keys of those that come later.

    The setting for it (see `backward_at_once`) is in AOT autograd's key, so it is set behind that.
    """
    from torch._functorch._aot_autograd import graph_compile
    from torch._functorch._aot_autograd.schemas import AOTConfig

    module: Any = graph_compile
    usual = module._aot_stage2b_bw_compile

    def at_once(*args: Any) -> Any:
        return usual(*(_not_lazy(a) if isinstance(a, AOTConfig) else a for a in args))

    module._aot_stage2b_bw_compile = at_once
    try:
        yield
    finally:
        module._aot_stage2b_bw_compile = usual


def _not_lazy(config: Any) -> Any:
    return dataclasses.replace(config, force_non_lazy_backward_lowering=True)


def unanalysed() -> contextlib.AbstractContextManager[Any]:
    """What is called inside goes past AOT autograd's check of custom ops, if that is what is on.

    A graph's first call is under it, each op at the price of some Python. For torch's ops and ours.
    """
    from torch.utils import _python_dispatch as dispatch

    mode = type(dispatch._get_current_dispatch_mode()).__name__
    if mode != "_AnalyzeCustomOpInputOutputMode":
        return contextlib.nullcontext()
    popped: contextlib.AbstractContextManager[Any] = dispatch._pop_mode_temporarily()
    return popped


def static_inputs() -> list[int]:
    """The numbers of the inputs that are parameters or buffers, while a graph is compiled."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    return list(metadata.static_input_indices) if metadata else []


def is_own_input(placeholder: Any) -> bool:
    """Whether it is an input of the whole graph, and no part of a tensor subclass.

    AOT autograd describes the inputs of its graphs; the bodies of higher-order ops have none.
    """
    from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTInput

    descriptor = placeholder.meta.get("desc")
    return descriptor is not None and not isinstance(descriptor, SubclassGetAttrAOTInput)


def results_of(graph: Any) -> list[int] | None:
    """Return the numbers of the outputs that a program sees, those of no gradient or mutation.

    All, of a graph whose outputs AOT autograd did not describe; None if it describes others.
    """
    from torch._functorch._aot_autograd import descriptors as kinds

    output = graph.output_node()
    described = output.meta.get("desc")
    if described is None:
        return list(range(len(output.args[0])))
    tokens = (kinds.ForwardTokenAOTOutput, kinds.BackwardTokenAOTOutput)
    left = [d for d in described if not isinstance(d, tokens)]  # AOT autograd takes tokens away
    if len(left) != len(output.args[0]):
        return None
    seen = (kinds.PlainAOTOutput, kinds.SubclassGetAttrAOTOutput)
    return [n for n, descriptor in enumerate(left) if isinstance(descriptor, seen)]

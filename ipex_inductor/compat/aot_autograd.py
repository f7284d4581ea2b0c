"""AOT autograd: when it compiles backward graphs, and how it describes inputs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """Compile backward graphs with their forward, not when they are first needed."""
    from torch._functorch import config as functorch_config

    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        yield


@contextlib.contextmanager
def backward_too() -> Iterator[None]:
    """Compile backward graphs with their forward, under the keys of lazily compiled ones.

    The setting of `backward_at_once` is in AOT autograd's key, so here it is set after the key is
    made.
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
    """Return the AOT configuration with lazy backward lowering switched off."""
    return dataclasses.replace(config, force_non_lazy_backward_lowering=True)


def skip_op_analysis() -> contextlib.AbstractContextManager[Any]:
    """Skip AOT autograd's check of custom ops for the calls inside, if that mode is on.

    A graph's first call is under that mode, which costs some Python per op. For torch's ops and
    ours.
    """
    from torch.utils import _python_dispatch as dispatch

    mode = type(dispatch._get_current_dispatch_mode()).__name__
    if mode != "_AnalyzeCustomOpInputOutputMode":
        return contextlib.nullcontext()
    popped: contextlib.AbstractContextManager[Any] = dispatch._pop_mode_temporarily()
    return popped


def static_inputs() -> list[int]:
    """Return the indices of the parameters and buffers among the inputs, during a compilation."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    return list(metadata.static_input_indices) if metadata else []


def is_own_input(placeholder: Any) -> bool:
    """Return whether `placeholder` is an input of the whole graph, not part of a tensor subclass.

    AOT autograd describes the inputs of its graphs; the bodies of higher-order ops have no
    descriptions.
    """
    from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTInput

    descriptor = placeholder.meta.get("desc")
    return descriptor is not None and not isinstance(descriptor, SubclassGetAttrAOTInput)


def results_of(graph: Any) -> list[int] | None:
    """Return the indices of the outputs that a program sees: no gradients, no mutations.

    All indices for a graph without descriptions of AOT autograd; None if the descriptions do not
    match the outputs.
    """
    from torch._functorch._aot_autograd import descriptors as kinds

    output = graph.output_node()
    described = output.meta.get("desc")
    if described is None:
        return list(range(len(output.args[0])))
    tokens = (kinds.ForwardTokenAOTOutput, kinds.BackwardTokenAOTOutput)
    descriptors = [
        d for d in described if not isinstance(d, tokens)
    ]  # AOT autograd takes tokens away
    if len(descriptors) != len(output.args[0]):
        return None
    visible_kinds = (kinds.PlainAOTOutput, kinds.SubclassGetAttrAOTOutput)
    return [n for n, descriptor in enumerate(descriptors) if isinstance(descriptor, visible_kinds)]

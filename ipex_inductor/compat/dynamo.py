"""Dynamo: begin and end of its compilations, the state that it keeps, its graphs and errors."""

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch

from ipex_inductor.compat import versions


def at_end_of_compile(call: Callable[[], None]) -> bool:
    """Do `call` once Dynamo or AOT autograd finishes the current compilation.

    AOT autograd saves a lazily compiled backward after it was compiled. Return False if no
    compilation is running whose end torch reports.
    """
    from torch._dynamo.callback import callback_handler

    pending = "_CompilationCallbackHandler__pending_callbacks_counter"
    if not getattr(callback_handler, pending, 0):
        return False
    _at_end.append(call)
    if _run_at_end not in callback_handler.end_callbacks:  # Dynamo's reset clears them
        callback_handler.register_end_callback(_run_at_end)
    return True


def around_next_compile(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Do `begin` when Dynamo next starts to trace, and `end` when that compilation is finished.

    Does nothing if Dynamo is not imported yet.
    """
    dynamos = sys.modules.get("torch._dynamo.callback")
    if dynamos is None:
        return
    starts = dynamos.callback_handler.start_callbacks

    def run_begin(_: Any) -> None:
        begin()
        at_end_of_compile(run_end)

    def run_end() -> None:
        if run_begin in starts:  # and not earlier: `run_begin` is called out of this list
            starts.remove(run_begin)
        end()

    starts.append(run_begin)


def hide_from_dynamo(module: str, functions: Iterable[Callable[..., Any]]) -> None:
    """Make Dynamo neither compile nor trace these functions of a module, nor their callees."""
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo import trace_rules
    from torch._dynamo.types import (  # type: ignore[attr-defined]
        FrameAction,
        FrameExecStrategy,
    )

    trace_rules.add(module)
    skipped = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for function in functions:
        set_code_exec_strategy(function.__code__, skipped)


@contextlib.contextmanager
def compiling_alone() -> Iterator[None]:
    """Hold off Dynamo's compilations, and let callers of compiled code in other threads run.

    Torch refuses compiled code while any thread traces; eager code runs in other threads meanwhile.
    """
    from torch._dynamo import config, convert_frame
    from torch.utils._python_dispatch import _disable_current_modes

    alone = config.patch(error_on_nested_fx_trace=False)
    with convert_frame.compile_lock, alone, _disable_current_modes():
        yield


def is_traced_by_others() -> bool:
    """Return whether torch.jit or torch.fx traces this thread, which compiled code cannot enter."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return bool(torch._C._is_tracing() or torch.fx._symbolic_trace.is_fx_symbolic_tracing())


_at_end: list[Callable[[], None]] = []


def _run_at_end(_: Any) -> None:
    while _at_end:
        _at_end.pop()()


def tensors_unprinted() -> None:
    """Print tensors as their type until Dynamo finishes the current compilation.

    Up to 2.12 its identity guards hold the text of each tensor, which on a GPU means a hundred
    elements that the host reads one by one. Other threads print as before.
    """
    torch_str: Any = torch._tensor_str
    printed, thread = torch_str._str, threading.get_ident()

    def brief(tensor: Any, **kwargs: Any) -> str:
        is_this_thread = threading.get_ident() == thread
        return f"<{type(tensor).__name__}>" if is_this_thread else printed(tensor, **kwargs)

    def restore() -> None:
        torch_str._str = printed

    if versions.torch_minor() < (2, 13) and at_end_of_compile(restore):
        torch_str._str = brief


@contextlib.contextmanager
def restore_counters() -> Iterator[None]:
    """Restore torch's counters at the end to their values at the beginning."""
    from torch._dynamo.utils import counters

    counts = {kind: group.copy() for kind, group in counters.items()}
    try:
        yield
    finally:
        for kind in counters.keys() - counts.keys():
            del counters[kind]
        for kind, group in counts.items():
            counters[kind].clear()
            counters[kind].update(group)


@contextlib.contextmanager
def dynamo_unchanged() -> Iterator[list[Any]]:
    """Make Dynamo forget what it compiles inside: frames, counters, observed shapes, graph breaks.

    The yielded list is filled at the end with the graph breaks: each has a `reason` and a
    `user_stack`. A frame that had been compiled before keeps its old entries, followed by the new
    ones.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import config
    from torch._dynamo.convert_frame import register_bytecode_hook
    from torch._dynamo.utils import graph_break_reasons

    first: dict[int, tuple[Any, bool]] = {}  # code, and whether it had been compiled before

    def note(code: Any, new_code: Any) -> None:
        first.setdefault(id(code), (code, bool(_debug_get_cache_entry_list(code))))

    earlier_breaks = len(graph_break_reasons)
    breaks: list[Any] = []
    handle = register_bytecode_hook(note)
    patches: dict[str, Any] = {
        "automatic_dynamic_shapes": False,  # shapes used inside must not make later ones symbolic
        "recompile_limit": 1 << 16,
        "accumulated_recompile_limit": 1 << 16,
    }
    try:
        with restore_counters(), config.patch(patches):
            yield breaks
    finally:
        handle.remove()
        breaks += graph_break_reasons[earlier_breaks:]
        del graph_break_reasons[earlier_breaks:]
        for code, compiled_before in first.values():
            if not compiled_before:
                reset_code(code)


_CALLERS = re.compile(r"L\['(?:args'\]\[|kwargs'\]\['|)(\w+)(?:'\]|\])")


def callers_name(placeholder: Any) -> str | None:
    """Return the name or number of this Dynamo graph input in the model's call, else None."""
    input = placeholder.meta.get("grapharg")
    if input is None or input.source is None:
        return None
    name = input.source.name
    match = _CALLERS.fullmatch(name() if callable(name) else name)
    return match[1] if match else None


def traced_name() -> str:
    """Return the module's class, or the function, that Dynamo compiles in this thread, or ""."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracer = InstructionTranslator.current_tx()
    except AttributeError:  # Dynamo has compiled nothing in this thread
        return ""
    if tracer is None:
        return ""
    owner = tracer.f_locals.get("self")
    return type(owner).__name__ if isinstance(owner, torch.nn.Module) else tracer.f_code.co_name


def drop_guards(compiled: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the code of a compiled function without its guards, a third of a short call's time.

    The caller answers for what they would find: arguments and state as at the latest guarded call.

    Args:
        compiled: the result of `torch.compile`, called before.

    Returns:
        A function of the same arguments; None if it was compiled several times, or in parts.
    """
    entries_of = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    function: Any = getattr(compiled, "_torchdynamo_orig_callable", None)
    entries = entries_of(function.__code__) if entries_of and function is not None else []
    if len(entries) != 1:
        return None
    code, known = entries[0].code, function.__globals__
    if sum(name.startswith("__compiled_fn") for name in code.co_names) != 1:
        return None
    if any(name.startswith("__resume_at") for name in code.co_names):
        return None
    # Names that a reset of Dynamo removes stay here.
    names = {name: known[name] for name in (*code.co_names, "__builtins__") if name in known}
    return FunctionType(code, names, code.co_name, None, function.__closure__)


def is_sharded(gm: Any) -> bool:
    """Return whether FSDP manages parameters of this Dynamo graph.

    FSDP gathers them again for each use, into existing tensors, without a change of their versions.
    """
    inputs = (node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder"))
    sources = (input.source for input in inputs if input is not None)
    return any(source.guard_source.is_fsdp_module() for source in sources)


def is_control_flow(error: BaseException) -> bool:
    """Return whether Dynamo raised `error` to steer itself, and not to report a fault.

    It does so to restart or to skip a frame.
    """
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
    from torch._inductor.exc import InductorError

    fault = isinstance(error, (BackendCompilerFailed, InductorError))
    return isinstance(error, TorchDynamoException) and not fault

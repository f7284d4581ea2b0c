"""The running backward, checkpointed regions and process groups: torch has no public API here."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.utils import checkpoint

T = TypeVar("T")


def backward_number() -> int | None:
    """Return the number of the backward that this thread executes, None outside of any."""
    number: int = torch._C._current_graph_task_id()
    return None if number < 0 else number


def runs_compiled_backward() -> bool:
    """Return True while compiled autograd executes a backward: nothing is called at its end."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # slow to import
    return bool(getattr(module, "in_compiled_autograd_region", False))


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward has computed all gradients."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def checkpointed_region() -> Any:
    """Return the innermost region of `torch.utils.checkpoint` that runs or is recomputed, or None.

    Setting its attribute `recompute_fn` changes what its recomputation calls. The reentrant form
    has no such object.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    for cell in getattr(hooks[0], "__closure__", None) or () if hooks else ():
        if isinstance(cell.cell_contents, checkpoint._CheckpointFrame):
            return cell.cell_contents
    return None


def compile_with_callers_alone(*functions: Callable[..., Any]) -> None:
    """Make Dynamo trace functions in the code that calls them, but compile no frame of theirs.

    Where the caller is left to eager mode, so are they and what they call.
    """
    from torch._C._dynamo import eval_frame

    dynamo: Any = eval_frame
    skip = dynamo._FrameAction.SKIP
    for function in functions:
        strategy = dynamo._FrameExecStrategy(skip, skip)
        dynamo.set_code_exec_strategy(function.__code__, strategy)


def left_to_eager_mode(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that Dynamo does not trace: it breaks the graph of a caller."""
    untraced: Callable[[], T] = _disable_dynamo(function)
    return untraced


def reduce_largest(row: Tensor, group: str) -> None:
    """Replace each element by the largest over the processes of a group; NaN is larger than all.

    Args:
        row: contiguous, fp32, no element below zero: the order of such numbers is that of their
            bits, and integers have one maximum whatever the order of processes.
        group: name of a process group.
    """
    module: Any = distributed.distributed_c10d
    process_group = module._resolve_process_group(group)
    distributed.all_reduce(row.view(torch.int32), op=distributed.ReduceOp.MAX, group=process_group)


def group_name(group: Any) -> str:
    """Return the name of a process group, of the default group for None, "" if there is none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    chosen: Any = distributed.group.WORLD if group is None else group
    return str(chosen.group_name)

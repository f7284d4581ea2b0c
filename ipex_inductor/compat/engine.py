"""The running backward, checkpointed regions and process groups, of which torch has no public API."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Variable
from torch.utils import checkpoint


def backward_number() -> int | None:
    """Return the number of the backward that this thread executes, None outside of any."""
    number: int = torch._C._current_graph_task_id()
    return None if number < 0 else number


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


def reduce_largest(row: Tensor, group: str) -> None:
    """Replace each element by the largest over the processes of a group; NaN is larger than all.

    Args:
        row: contiguous, fp32, no element below zero: the order of such numbers is that of their
            bits, and integers have one maximum whatever the order of processes.
        group: name of a process group.
    """
    process_group = distributed.distributed_c10d._resolve_process_group(group)
    distributed.all_reduce(
        row.view(torch.int32), op=distributed.ReduceOp.MAX, group=process_group
    )


def group_name(group: Any) -> str:
    """Return the name of a process group, of the default group for None, "" if there is none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    chosen: Any = distributed.group.WORLD if group is None else group
    return str(chosen.group_name)

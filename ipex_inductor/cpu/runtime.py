"""Pinned threads, by IPEX's names of `ipex.cpu.runtime`; see docs/guides/cpu.md."""

from ipex_inductor.cpu.cores import get_core_list_of_node_id
from ipex_inductor.cpu.pool import CPUPool, Task, TaskFuture, is_runtime_ext_enabled, pin
from ipex_inductor.cpu.streams import (
    MultiStreamModule,
    MultiStreamModuleHint,
    get_default_num_streams,
)

__all__ = [
    "CPUPool",
    "MultiStreamModule",
    "MultiStreamModuleHint",
    "Task",
    "TaskFuture",
    "get_core_list_of_node_id",
    "get_default_num_streams",
    "is_runtime_ext_enabled",
    "pin",
]

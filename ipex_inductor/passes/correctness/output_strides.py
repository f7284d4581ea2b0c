"""Restore the traced strides of results after Inductor's joint passes.

On GPUs Inductor pads products (`pad_mm`) and slices the results. A slice has the strides of the
padded tensor. Inductor records the strides that results must have after that pass, so the caller
gets a result that cannot be viewed as eager's can.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

from ipex_inductor import compat
from ipex_inductor.errors import PassError
from ipex_inductor.passes.engine.source import user_line
from ipex_inductor.passes.engine.whole_ops import copy_restrided, lies_alike
from ipex_inductor.reporting.decisions import GraphReport
from ipex_inductor.templates.optimizer.step_cpp import fill_block

NAME = "strides of results"


class OutputStrides(CustomGraphPass):
    """Pass that restores the strides of results after Inductor's joint passes and the user's.

    Args:
        report: Gets the decisions.
        user_passes: The passes of `joint_custom_post_pass`, which run first.
    """

    def __init__(
        self, report: GraphReport, user_passes: list[Callable[[torch.fx.Graph], object]]
    ) -> None:
        self._report, self._user_passes = report, user_passes
        self._traced: dict[int, Tensor] = {}

    def record(self, graph: torch.fx.Graph) -> None:
        """Record the strides of the results of a traced graph."""
        outputs: Any = graph.output_node().args[0]
        results = compat.results_of(graph)
        if results is None:
            reason = "AOT autograd describes other outputs than the graph has"
            self._report.add("missed", NAME, reason)
        values = {n: _value(outputs[n]) for n in results or ()}
        self._traced = {n: v for n, v in values.items() if v is not None and _is_dense(v)}

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Copy results whose strides differ from the traced ones."""
        for user_pass in self._user_passes:
            user_pass(graph)
        try:
            self._restore(graph)
        except Exception as error:
            raise PassError(
                "the strides of results to be restored",
                f"{type(error).__name__}: {error}",
                "Please report it.",
            ) from error

    def _restore(self, graph: torch.fx.Graph) -> None:
        output = graph.output_node()
        outputs: Any = output.args[0]
        copies: dict[int, torch.fx.Node] = {}
        for number, traced in self._traced.items():
            node = outputs[number]
            value = _value(node)
            if value is None or value.shape != traced.shape or lies_alike(value, traced):
                continue
            self._report.add("fired", NAME, "a pass of Inductor's changed them", user_line(node))
            copies[number] = copy_restrided(graph, node, traced)
        if copies:
            output.args = (tuple(copies.get(n, node) for n, node in enumerate(outputs)),)

    def uuid(self) -> Any | None:
        """Return what distinguishes the passes; None (no caching) if a user's has no uuid."""
        uuids = compat.uuids_of(self._user_passes)
        return None if uuids is None else (NAME, *uuids)


def _value(node: Any) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, Tensor) and value.layout == torch.strided else None


def _is_dense(value: Tensor) -> bool:
    """Return whether elements fill a block of memory, each once, for the present sizes."""
    sizes, strides = compat.hints(value), tuple(map(compat.hints, value.stride()))
    return None not in (*sizes, *strides) and fill_block(sizes, strides)

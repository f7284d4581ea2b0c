"""Registration of lowerings with Inductor."""

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.lowering import process_subgraph_nodes, register_lowering
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from ipex_inductor import compat
from ipex_inductor.ops.common.defining import Arguments, name_arguments


def register_by_name(overload: torch._ops.OpOverload, lower: Callable[[Arguments], object]) -> None:
    """Register a function of an op's arguments by name as its lowering in Inductor's table."""

    def lower_call(*args: Any, **named: Any) -> object:
        return lower(name_arguments(overload, args, named))

    register_lowering(overload, type_promotion_kind=None)(lower_call)


def expand(overload: torch._ops.OpOverload, compute: Callable[[Arguments], torch.Tensor]) -> object:
    """Lower the present node as torch's ops that compute it.

    Args:
        overload: op of the node.
        compute: computes the op of its arguments by name.
    """
    node = V.graph.current_node
    nodes = node.all_input_nodes

    def compute_node(*values: torch.Tensor) -> torch.Tensor:
        by_node = dict(zip(nodes, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: by_node[n])
        return compute(name_arguments(overload, args, kwargs))

    values = [each.meta["val"] for each in nodes]
    with V.fake_mode:
        traced = make_fx(compute_node, decomposition_table=compat.decomposition_table())(*values)
    return process_subgraph_nodes(traced, [V.graph.env[each] for each in nodes])

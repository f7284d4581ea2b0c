"""Facts read from a graph before it is compiled: the user's lines, optimizer steps, attention."""

from collections.abc import Iterator
from typing import Any

import torch

from ipex_inductor.reporting.decisions import user_line as user_line

ATTEND = torch.nn.functional.scaled_dot_product_attention
ATTENTION = (ATTEND, torch.ops.aten.scaled_dot_product_attention.default)
FUSED_STEPS: dict[Any, str] = {  # torch's fused step ops and their optimizers
    torch._fused_adam_: "Adam",
    torch._fused_adamw_: "AdamW",
    torch._fused_sgd_: "SGD",
    torch._fused_adagrad_: "Adagrad",
}
OPTIMIZER_STEP = "optimizer-step"  # the rule's name in options and reports


def is_step(gm: torch.fx.GraphModule) -> bool:
    """Return whether a graph is an optimizer's step, by its first operation's source or its ops."""
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    first = next((n.stack_trace for n in calls if n.stack_trace), "")
    fused = any(n.target in FUSED_STEPS for n in calls)
    return fused or "torch/optim/" in first.replace("\\", "/")


def attentions(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """Yield the calls of torch's attention, before AOT autograd."""
    for op in ATTENTION:
        yield from graph.find_nodes(op="call_function", target=op)

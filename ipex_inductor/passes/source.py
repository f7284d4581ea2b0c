"""Where in the source a node of a graph comes from: the user's, or torch's optimizers."""

import torch

OPTIMIZER_STEP = "optimizer-step"  # its rule, for options and reports


def user_line(node: torch.fx.Node) -> str:
    """The innermost line of the user's source that made `node`, as file:line text."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if "File " in line]
    return frames[-1] if frames else ""


def is_step(gm: torch.fx.GraphModule) -> bool:
    """Whether this is the step of an optimizer, by the source of its first operation."""
    calls = (n for n in gm.graph.nodes if n.op in ("call_function", "call_method"))
    first = next((n.stack_trace for n in calls if n.stack_trace), "")
    return "torch/optim/" in first.replace("\\", "/")

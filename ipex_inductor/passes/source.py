"""Where in the user's source a node of a graph comes from."""

import torch


def user_line(node: torch.fx.Node) -> str:
    """The innermost line of the user's source that made `node`, as file:line text."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if "File " in line]
    return frames[-1] if frames else ""

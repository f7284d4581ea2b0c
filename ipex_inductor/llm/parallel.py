"""Tensor parallelism: linear layers of a model cut over the processes of a device mesh.

Weights become plain tensors of the process, not DTensors, so compiled code packs them. DTensor sums
the results of layers that are cut along K.
"""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Plan = Mapping[str, str]


class RowParallelLinear(nn.Linear):
    """A linear layer of which each process has some columns: results are summed over processes."""

    mesh: "DeviceMesh"

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result on this process's columns of `x`, summed, with the bias."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        part = DTensor.from_local(F.linear(x, self.weight), self.mesh, [Partial()])
        total = part.redistribute(placements=[Replicate()]).to_local()
        return total if self.bias is None else total + self.bias


def cut_rows(linear: nn.Linear, mesh: "DeviceMesh", name: str) -> None:
    """Keep this process's rows of the weight, and of the bias."""
    linear.weight = _keep(linear.weight, 0, mesh, name)
    if linear.bias is not None:
        linear.bias = _keep(linear.bias, 0, mesh, name)
    linear.out_features = linear.weight.shape[0]


def cut_columns(linear: nn.Linear, mesh: "DeviceMesh", name: str) -> None:
    """Keep this process's columns of the weight, and sum results over processes."""
    if type(linear) is not nn.Linear:
        came = f"a {type(linear).__name__} at {name}"
        raise ArgumentError("a torch.nn.Linear", came, "Parallelize before other changes.")
    linear.weight = _keep(linear.weight, 1, mesh, name)
    linear.in_features = linear.weight.shape[1]
    linear.__class__ = RowParallelLinear
    vars(linear)["mesh"] = mesh


def _keep(param: Tensor, axis: int, mesh: "DeviceMesh", name: str) -> nn.Parameter:
    """Return this process's part of a parameter.

    Raises:
        ArgumentError: if the processes do not divide it.
    """
    count, size = mesh.size(), param.shape[axis]
    if size % count:
        came = f"{size} of {name}"
        raise ArgumentError(f"sizes that {count} processes divide", came, "Use fewer processes.")
    each = size // count
    part = param.detach().narrow(axis, mesh.get_local_rank() * each, each)
    return nn.Parameter(part.clone(), requires_grad=param.requires_grad)


# Names as in plans of transformers. Replicated modules stay whole.
CUTS: dict[str, Callable[[nn.Linear, "DeviceMesh", str], None] | None] = {
    "colwise": cut_rows,
    "rowwise": cut_columns,
    "replicated_with_grad_allreduce": None,
}


@torch.no_grad()
def parallelize(model: Any, mesh: "DeviceMesh", plan: Plan | None = None) -> Any:
    """Cut the linear layers of a language model over the processes of `mesh`, in place.

    Each process calls this on the whole model, then `llm.optimize(model, inplace=True)`, and then
    calls the model with the same inputs. Sampling needs the same seed in each process. Embeddings,
    norms and the head stay whole.

    Args:
        model: a model of transformers, whose config has `base_model_tp_plan`.
        mesh: of one dimension.
        plan: "colwise" or "rowwise" by module names, in which "*" stands for a number; None for the
            plan of the model's config.

    Returns:
        The model.

    Raises:
        ArgumentError: without a plan, for a plan of other cuts, or if processes do not divide
            heads and layers.
    """
    config = model.config.get_text_config(decoder=True)
    if mesh.ndim != 1:
        came = f"{mesh.ndim} dimensions"
        raise ArgumentError(
            "a mesh of one dimension", came, "Pass one dimension of it: mesh[name]."
        )
    plan = getattr(config, "base_model_tp_plan", None) if plan is None else plan
    if not plan:
        advice = 'Pass plan={"layers.*.mlp.up_proj": "colwise", ...}, or use vLLM.'
        raise ArgumentError("a config with base_model_tp_plan", type(config).__name__, advice)
    if others := sorted({*plan.values()} - CUTS.keys()):
        advice = "Layers of experts are not cut here: use vLLM."
        raise ArgumentError(f"cuts of {', '.join(CUTS)}", ", ".join(others), advice)
    _check_heads(config, mesh.size())
    for name, module in model.named_modules():
        cut = CUTS[_find_cut(name, plan)]
        if cut is not None:
            cut(module, mesh, name)
    return model


def _find_cut(name: str, plan: Plan) -> str:
    """Return the cut of a module, that of replicated ones if the plan has no word for it."""
    for pattern, cut in plan.items():
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        if re.search(rf"(^|\.){expression}$", name):
            return cut
    return "replicated_with_grad_allreduce"


def _check_heads(config: Any, count: int) -> None:
    """Raise `ArgumentError` if processes do not divide the key-value heads."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % count:
        came = f"{heads} key-value heads"
        raise ArgumentError(f"heads that {count} processes divide", came, "Use fewer processes.")

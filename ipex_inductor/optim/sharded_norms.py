"""Norms of DTensors: sums of squares that the processes of a mesh add up in a step.

All processes do so in each step of the optimizer, for all its parameters on the mesh, with or
without gradients. So no process waits for one that does not take part, and a sum is of one
parameter everywhere.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipex_inductor.errors import DeviceError
from ipex_inductor.optim.shards import is_sharded

Key = tuple[Any, torch.device]  # a mesh, and the device of this process's parts
# Whether all processes of a mesh have kernels for all of its parameters, as they have agreed.
_agreed: "weakref.WeakKeyDictionary[Optimizer, dict[Key, bool]]" = weakref.WeakKeyDictionary()


class Shares:
    """Sums of `norms` kinds for each of `params`, which are on one mesh.

    A kernel writes its local sums to the row of its parameter, and `add_up` computes the totals of
    all processes. A part without elements adds 0. If a process has no gradient where others have
    one, the total is infinite and so the rate NaN: a norm without that part would be wrong without
    notice.
    """

    def __init__(self, key: Key, params: Sequence[nn.Parameter], norms: int) -> None:
        self._mesh, device = key
        self._rows = {param: number for number, param in enumerate(params)}
        self._dims = _find_sharded_dims(self._mesh, params)
        local_sums = [[0.0 if p.grad is not None else math.inf] * norms for p in params]
        parts = [[1 / _copies(p, self._dims)] * norms for p in params]
        self._own, self._parts = _send_to_device([local_sums, parts], device)
        self._totals = torch.empty_like(self._own)

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._rows

    def places(self, param: nn.Parameter) -> list[int]:
        """Return the addresses of the local sums of `param` and of its totals."""
        at = self._rows[param] * self._totals[0].nbytes
        return [self._own.data_ptr() + at, self._totals.data_ptr() + at]

    def add_up(self) -> None:
        """Compute the totals: one collective for each mesh dimension that cuts a parameter."""
        torch.mul(self._own, self._parts, out=self._totals)  # replicated elements count once
        for dim in self._dims:
            torch.distributed.all_reduce(self._totals, group=self._mesh.get_group(dim))

    def say(self, able: bool) -> bool:
        """Return whether all processes of the mesh are `able`; waits for them."""
        votes = torch.tensor(float(able), device=self._own.device)
        reduction = torch.distributed.ReduceOp.MIN
        for dim in self._dims:
            torch.distributed.all_reduce(votes, reduction, group=self._mesh.get_group(dim))
        return bool(votes.item())


def shares_of(optimizer: Optimizer, norms: int) -> dict[Key, Shares]:
    """Return the shares of all meshes where kernels may compute norms, equal in all processes."""
    params_by_key: dict[Key, dict[nn.Parameter, None]] = {}
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        if is_sharded(param) and _adds_up(param):
            params_by_key.setdefault((param.device_mesh, param.device), {})[param] = None
    agreed = _agreed.get(optimizer, {})
    return {
        key: Shares(key, [*params_by_key[key]], norms)
        for key in params_by_key
        if agreed.get(key, True)
    }


def agree(optimizer: Optimizer, key: Key, shares: Shares, missed: str | None) -> bool:
    """Return whether kernels step the parameters of `shares` in all processes of the mesh.

    The processes agree in their first step.

    Args:
        optimizer: the fused optimizer.
        key: the mesh, and the device of this process's parts.
        shares: the parameters on the mesh.
        missed: reason why this process cannot step one of them, or None.

    Raises:
        DeviceError: such a reason in a later step, of which the other processes do not know.
    """
    agreed = _agreed.setdefault(optimizer, {})
    if key not in agreed:
        agreed[key] = shares.say(missed is None)
    elif agreed[key] and missed:
        required = "a part of a tensor that a kernel steps, as in the first step"
        advice = "The other processes wait for its norm: have it in the layout that it had."
        raise DeviceError(required, f"one that would be left to torch, for {missed}", advice)
    return agreed[key]


def total_norm(grads: Sequence[Tensor]) -> Tensor | None:
    """Return the norm of all `grads`, DTensors among them, in fp32, or fp64 if one of them is fp64.

    One collective runs for each mesh dimension along which a gradient is cut. The norm is NaN if
    processes have different numbers of gradients, as a missing part would go unnoticed. None if
    squares of parts do not add up.
    """
    by_mesh: dict[Any, dict[tuple[Any, ...], list[Any]]] = {}
    for grad in grads:
        dtensor: Any = grad
        mesh, placements = (
            (dtensor.device_mesh, dtensor.placements) if is_sharded(grad) else (None, ())
        )
        by_mesh.setdefault(mesh, {}).setdefault(placements, []).append(grad)
    samples = [
        layout_grads[0]
        for mesh, by_layout in by_mesh.items()
        if mesh is not None
        for layout_grads in by_layout.values()
    ]
    if not all(map(_adds_up, samples)):
        return None
    device, real = grads[0].device, torch.float32
    if any(grad.dtype is torch.float64 for grad in grads):
        real = torch.float64
    squares = [
        _squares(mesh, [*by_layout.values()]).to(device) for mesh, by_layout in by_mesh.items()
    ]
    return torch.stack(squares).sum().sqrt().to(real)


def _squares(mesh: Any, grad_lists: Sequence[list[Any]]) -> Tensor:
    """Return the sum of squares (fp64) of whole gradients on `mesh`.

    `grad_lists`: gradients that are cut in one way, a list for each way.
    """
    # `local` would detach, which takes longer and is not needed: autograd records nothing here.
    parts = [[g._local_tensor if mesh is not None else g for g in grads] for grads in grad_lists]
    sums = [torch.stack(_norms(grads)).double().square().sum() for grads in parts]
    dims = [] if mesh is None else _find_sharded_dims(mesh, [grads[0] for grads in grad_lists])
    if not dims:
        return torch.stack(sums).sum()
    sums = [total / _copies(grads[0], dims) for total, grads in zip(sums, grad_lists, strict=True)]
    count = sum(map(len, grad_lists))
    totals = torch.stack([torch.stack(sums).sum(), torch.full_like(sums[0], count)])
    for dim in dims:
        torch.distributed.all_reduce(totals, group=mesh.get_group(dim))
    expected_count = count * math.prod(mesh.size(dim) for dim in dims)
    return torch.where(totals[1] == expected_count, totals[0], math.nan)


def _norms(parts: list[Tensor]) -> list[Tensor]:
    """Return the norm of each part; low precision is accumulated in fp32."""
    norms: list[Tensor] = []
    low = [part for part in parts if part.dtype.itemsize < torch.float32.itemsize]
    high = [part for part in parts if part.dtype.itemsize >= torch.float32.itemsize]
    for tensors, real in ((low, torch.float32), (high, None)):
        norms += torch._foreach_norm(tensors, 2, dtype=real) if tensors else []
    return norms


def _adds_up(param: Any) -> bool:
    """Return whether squares of all parts add up to the whole, and this process has a part."""
    partial = any(placement.is_partial() for placement in param.placements)
    takes_part = (
        param.device.type in ("cpu", "cuda") and param.device_mesh.get_coordinate() is not None
    )
    return takes_part and not partial


def _find_sharded_dims(mesh: Any, params: Sequence[Any]) -> list[int]:
    """Return the dimensions of `mesh` along which a parameter is cut among several processes."""
    several = (dim for dim in range(mesh.ndim) if mesh.size(dim) > 1)
    return [d for d in several if any(not p.placements[d].is_replicate() for p in params)]


def _copies(param: Any, dims: Sequence[int]) -> int:
    """Return how many processes hold each element, along the dimensions `dims`."""
    mesh, placements = param.device_mesh, param.placements
    return math.prod(mesh.size(dim) for dim in dims if placements[dim].is_replicate())


def _send_to_device(values: list[Any], device: torch.device) -> Tensor:
    """Return the values in fp64 on `device`, copied without a wait."""
    host_tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
    if device.type == "cpu":
        return host_tensor
    return host_tensor.pin_memory().to(device, non_blocking=True)

"""Norms of DTensors: the sums of squares that the processes of a mesh add up in a step.

All of them do so in each step of the optimizer, for all its parameters on the mesh, whatever
gradients one of them has: so nobody waits for somebody who does not come, and a sum is of the same
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

Key = tuple[Any, torch.device]  # a mesh, and where this process has its parts
# What all processes of a mesh have said: that each has kernels for all, or that one has not.
_agreed: "weakref.WeakKeyDictionary[Optimizer, dict[Key, bool]]" = weakref.WeakKeyDictionary()


class Shares:
    """The sums of `norms` for each of these parameters, which are on one mesh.

    What a kernel here finds goes to its own row, and `add_up` makes the totals of all processes. A
    part without elements adds 0. Who has no gradient where others have one makes the total infinite
    and so their rates NaN: of a norm without his part nobody would see that it is wrong.
    """

    def __init__(self, key: Key, params: Sequence[nn.Parameter], norms: int) -> None:
        self._mesh, device = key
        self._rows = {param: number for number, param in enumerate(params)}
        self._dims = _shared(self._mesh, params)
        own = [[0.0 if p.grad is not None else math.inf] * norms for p in params]
        parts = [[1 / _copies(p, self._dims)] * norms for p in params]
        self._own, self._parts = _sent([own, parts], device)
        self._totals = torch.empty_like(self._own)

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._rows

    def places(self, param: nn.Parameter) -> list[int]:
        """Where a kernel writes the sums of what is here, and finds those of all."""
        at = self._rows[param] * self._totals[0].nbytes
        return [self._own.data_ptr() + at, self._totals.data_ptr() + at]

    def add_up(self) -> None:
        """Make the totals: a collective for each dimension along which something is cut."""
        torch.mul(self._own, self._parts, out=self._totals)  # what several have counts once
        for dim in self._dims:
            torch.distributed.all_reduce(self._totals, group=self._mesh.get_group(dim))

    def say(self, able: bool) -> bool:
        """Whether all processes are `able`, for which this one waits."""
        said = torch.tensor(float(able), device=self._own.device)
        least = torch.distributed.ReduceOp.MIN
        for dim in self._dims:
            torch.distributed.all_reduce(said, least, group=self._mesh.get_group(dim))
        return bool(said.item())


def shares_of(optimizer: Optimizer, norms: int) -> dict[Key, Shares]:
    """Those of the meshes on which kernels may take norms; the same ones in all processes."""
    found: dict[Key, dict[nn.Parameter, None]] = {}
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        if is_sharded(param) and _adds_up(param):
            found.setdefault((param.device_mesh, param.device), {})[param] = None
    said = _agreed.get(optimizer, {})
    return {key: Shares(key, [*found[key]], norms) for key in found if said.get(key, True)}


def agree(optimizer: Optimizer, key: Key, shares: Shares, missed: str | None) -> bool:
    """Whether kernels step these, in all processes of the mesh, which say so in their first step.

    `missed`: why not, here. What is missed after that raises `DeviceError`: the others do not know.
    """
    said = _agreed.setdefault(optimizer, {})
    if key not in said:
        said[key] = shares.say(missed is None)
    elif said[key] and missed:
        wanted = "a part of a tensor that a kernel steps, as in the first step"
        todo = "The other processes wait for its norm: have it in the layout that it had."
        raise DeviceError(wanted, f"one that would be left to torch, for {missed}", todo)
    return said[key]


def total_norm(grads: Sequence[Tensor]) -> Tensor | None:
    """The norm of all these, DTensors among them, in fp32, or fp64 if one of them is.

    A collective for each dimension of a mesh along which one is cut. It is NaN where one process
    has more of them than another: nobody would see that a part is missing. None where parts do not
    add up.
    """
    cut: dict[Any, dict[tuple[Any, ...], list[Any]]] = {}
    for grad in grads:
        its: Any = grad
        mesh, places = (its.device_mesh, its.placements) if is_sharded(grad) else (None, ())
        cut.setdefault(mesh, {}).setdefault(places, []).append(grad)
    first = [each[0] for mesh, on in cut.items() if mesh is not None for each in on.values()]
    if not all(map(_adds_up, first)):
        return None
    device, real = grads[0].device, torch.float32
    if any(grad.dtype is torch.float64 for grad in grads):
        real = torch.float64
    squares = [_squares(mesh, [*on.values()]).to(device) for mesh, on in cut.items()]
    return torch.stack(squares).sum().sqrt().to(real)


def _squares(mesh: Any, alike: Sequence[list[Any]]) -> Tensor:
    """The sum of squares of whole gradients on that mesh, in fp64; of lists that are cut alike."""
    # Not by `local`: autograd follows nothing here, and it takes longer.
    parts = [[g._local_tensor if mesh is not None else g for g in its] for its in alike]
    own = [torch.stack(_norms(its)).double().square().sum() for its in parts]
    dims = [] if mesh is None else _shared(mesh, [its[0] for its in alike])
    if not dims:
        return torch.stack(own).sum()
    own = [total / _copies(its[0], dims) for total, its in zip(own, alike, strict=True)]
    count = sum(map(len, alike))
    said = torch.stack([torch.stack(own).sum(), torch.full_like(own[0], count)])
    for dim in dims:
        torch.distributed.all_reduce(said, group=mesh.get_group(dim))
    everyone = count * math.prod(mesh.size(dim) for dim in dims)
    return torch.where(said[1] == everyone, said[0], math.nan)


def _norms(parts: list[Tensor]) -> list[Tensor]:
    """One of each; low precision is added up in fp32."""
    found: list[Tensor] = []
    low = [part for part in parts if part.dtype.itemsize < torch.float32.itemsize]
    high = [part for part in parts if part.dtype.itemsize >= torch.float32.itemsize]
    for its, real in ((low, torch.float32), (high, None)):
        found += torch._foreach_norm(its, 2, dtype=real) if its else []
    return found


def _adds_up(param: Any) -> bool:
    """Whether the squares of all parts are those of the whole, and this process takes part."""
    partial = any(placement.is_partial() for placement in param.placements)
    there = param.device.type in ("cpu", "cuda") and param.device_mesh.get_coordinate() is not None
    return there and not partial


def _shared(mesh: Any, params: Sequence[Any]) -> list[int]:
    """The dimensions of `mesh` along which one of them is cut, among several processes."""
    several = (dim for dim in range(mesh.ndim) if mesh.size(dim) > 1)
    return [d for d in several if any(not p.placements[d].is_replicate() for p in params)]


def _copies(param: Any, dims: Sequence[int]) -> int:
    """How many processes have each element, along those dimensions."""
    mesh, places = param.device_mesh, param.placements
    return math.prod(mesh.size(dim) for dim in dims if places[dim].is_replicate())


def _sent(values: list[Any], device: torch.device) -> Tensor:
    """The values in fp64 over there; nobody waits."""
    made = torch.tensor(values, dtype=torch.float64, device="cpu")
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)

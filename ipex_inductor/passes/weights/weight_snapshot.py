"""One graph's results for one model, and the request for the graph that reads plain weights."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ipex_inductor.passes.weights.weight_contents import DeviceContents, Launched
from ipex_inductor.passes.weights.weight_results import Part
from ipex_inductor.templates.tensor_reader.weights_cpp import Contents

UNPAID = 3  # how often weights change before computing is paid back until plain ones are read


class PlainGraph(Exception):
    """Requests the graph that reads plain weights.

    Attributes:
        weights: The weights that the results would have been computed from.
        calls: The number of calls for which the weights must stay before results are recomputed.
        resume: Allows recomputing; called after that many calls.
    """

    def __init__(
        self,
        weights: tuple[torch.Tensor, ...],
        calls: int,
        reason: str,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(reason)
        self.weights, self.calls, self.resume = weights, calls, resume


class Owner(Protocol):
    """Protocol of the owner of one graph's results for all its models."""

    left: list[Part]  # of a model with a dead weight

    def drop(self, snapshot: "Snapshot") -> None:
        """Drop the results for one model."""


@dataclass(frozen=True)
class Current:
    """Results that are up to date, and what was read of the weights; replaced as a whole."""

    read: bytes
    contents: Contents | None
    on_devices: DeviceContents | None
    values: list[torch.Tensor]


class Snapshot:
    """One graph's results for one model.

    Attributes:
        calls: Calls since the results were computed.
        unpaid: How often in a row they were outdated before computing was paid back.
        resumes: Whether they may be computed though they were not paid back before.
        storages: Addresses of the weights' storages.
    """

    def __init__(self, owner: Owner, key: tuple[int, ...]) -> None:
        self.key = key
        self.ends = (key[0], key[-1]) if key else ()
        self.parts: list[Part] = []
        self.storages: frozenset[int] = frozenset()
        self.current: Current | None = None
        self.is_new, self.resumes = True, False
        self.calls = self.unpaid = 0
        self._owner = weakref.ref(owner)

    def hold(self, parts: "Sequence[Part]") -> None:
        """Hold `parts`, and be notified when they are outdated."""
        self.parts = list(parts)
        self.storages = frozenset(storage for part in parts for storage in part.watched)
        for part in parts:
            users = (user for user in part.users if user() not in (None, self))
            part.users = (*users, weakref.ref(self))

    def give_up(self, weights: tuple[torch.Tensor, ...], calls: int, reason: str) -> PlainGraph:
        """Give up the results; return the request for the graph without them.

        Args:
            weights: The weights of the graph.
            calls: The number of calls for which the weights must stay.
            reason: Why the results are given up.
        """
        for part in self.parts:
            part.outdate()
        self.current = None
        return PlainGraph(weights, calls, reason, self.resume)

    def resume(self) -> None:
        """Allow results to be computed once more; if that is not paid back, give up again."""
        self.resumes, self.unpaid = True, UNPAID - 1

    def die(self) -> None:
        """Leave the graph, as a weight of the model died."""
        self.current = None
        owner = self._owner()
        if owner is not None:
            owner.left = self.parts  # parts of weights that live on serve the next model
            owner.drop(self)

    @property
    def size(self) -> int:
        """The size of the results in bytes."""
        return sum(value.nbytes for part in self.parts for value in part.values)

    @property
    def device(self) -> torch.device:
        """The device of the results."""
        devices = (value.device for part in self.parts for value in part.values)
        return next(devices, torch.device("cpu"))


@dataclass(frozen=True)
class Check:
    """A comparison of contents that GPUs have begun, for results that a graph reads meanwhile."""

    snapshot: Snapshot
    current: Current
    launched: Launched

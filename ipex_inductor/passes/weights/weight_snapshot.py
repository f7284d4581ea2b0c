"""One graph's results for one model, and the request for the graph that reads plain weights."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ipex_inductor.passes.weights.weight_contents import DeviceContents, Launched
from ipex_inductor.passes.weights.weight_results import Part
from ipex_inductor.templates.tensor_reader.weights_cpp import Contents

UNPAID = 3  # times that weights change before computing was paid back, until plain ones are read


class PlainGraph(Exception):
    """Asks for the graph that reads plain weights.

    Attributes:
        weights: those that the results would have been computed from.
        calls: how many calls they must stay as they are before results are computed again.
        resume: allows that; to be called then.
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
    """What holds the results of a graph for all its models."""

    left: list[Part]  # of a model of which a weight died

    def drop(self, snapshot: "Snapshot") -> None:
        """Drop the results for one model."""


@dataclass(frozen=True)
class Current:
    """Results that are up to date, and what was read of the weights; replaced whole."""

    read: bytes
    contents: Contents | None
    on_devices: DeviceContents | None
    values: list[torch.Tensor]


class Snapshot:
    """One graph's results for one model.

    Attributes:
        calls: made since the results were computed.
        unpaid: how often in a row they were outdated before computing was paid back.
        resumes: whether they may be computed though they were not paid back before.
        storages: addresses of the weights' storages.
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
        """Hold `parts`, and learn when they are outdated."""
        self.parts = list(parts)
        self.storages = frozenset(storage for part in parts for storage in part.watched)
        for part in parts:
            users = (user for user in part.users if user() not in (None, self))
            part.users = (*users, weakref.ref(self))

    def left(self, weights: tuple[torch.Tensor, ...], calls: int, reason: str) -> PlainGraph:
        """Give up the results; return the request for the graph without them."""
        for part in self.parts:
            part.outdate()
        self.current = None
        return PlainGraph(weights, calls, reason, self.resume)

    def resume(self) -> None:
        """Allow results to be computed once more; the next time unpaid ends that."""
        self.resumes, self.unpaid = True, UNPAID - 1

    def die(self) -> None:
        """Leave the graph, as a weight of the model died."""
        self.current = None
        owner = self._owner()
        if owner is not None:
            owner.left = self.parts  # those of weights that live on serve the model that follows
            owner.drop(self)

    @property
    def size(self) -> int:
        """The bytes of the results."""
        return sum(value.nbytes for part in self.parts for value in part.values)

    @property
    def device(self) -> torch.device:
        """Where the results lie."""
        devices = (value.device for part in self.parts for value in part.values)
        return next(devices, torch.device("cpu"))


@dataclass(frozen=True)
class Check:
    """A comparison of contents that GPUs have begun, for results that a graph reads meanwhile."""

    snapshot: Snapshot
    current: Current
    launched: Launched

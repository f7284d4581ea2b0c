"""Accuracy of a quantized network beside that of the network in floating point."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.quantization import QConfigMapping, convert, prepare
from ipex_inductor.reporting import decisions

CALIBRATION = 200  # samples


@dataclass(frozen=True)
class Case:
    """A network with data; `batches` are arguments of its calls, `labels` those of all batches."""

    model: nn.Module
    calibration: list[tuple[Any, ...]]
    batches: list[tuple[Any, ...]]
    labels: Tensor

    @cached_property
    def exact(self) -> Tensor:
        """Return the outputs in floating point."""
        return scores(self.model, self.batches)

    def compare(self, quantized: Callable[..., Tensor]) -> "Comparison":
        """Return the accuracy of a quantized form beside that of the network."""
        return compare(self.exact, scores(quantized, self.batches), self.labels)


@dataclass(frozen=True)
class Comparison:
    """Shares in percent: of right answers in both forms, and of equal answers."""

    exact: float
    quantized: float
    agreement: float
    samples: int

    @property
    def drop(self) -> float:
        """Return how many points of accuracy quantization costs."""
        return self.exact - self.quantized


def compare(exact: Tensor, quantized: Tensor, labels: Tensor) -> Comparison:
    """Return the comparison of two tensors of scores [samples, classes]."""
    answers, others = exact.argmax(1), quantized.argmax(1)
    shares = [
        100 * (a == b).double().mean().item()
        for a, b in ((answers, labels), (others, labels), (answers, others))
    ]
    return Comparison(*shares, samples=len(labels))


@torch.no_grad()
def scores(model: Callable[..., Tensor], batches: Iterable[tuple[Any, ...]]) -> Tensor:
    """Return the outputs of a model for all batches, one below the other."""
    return torch.cat([model(*batch) for batch in batches])


def last_int8_calls() -> int:
    """Return how many products of the graph compiled last are calls on integers."""
    fired = decisions.reports()[-1].count("fired")
    return sum(count for name, count in fired.items() if name.startswith("int8 "))


@torch.no_grad()
def quantize(model: nn.Module, scheme: Any, calibration: list[tuple[Any, ...]]) -> nn.Module:
    """Return the quantized form of a model; `scheme` is one for all layers, or a mapping."""
    mapping = scheme if hasattr(scheme, "global_qconfig") else QConfigMapping().set_global(scheme)
    prepared = prepare(model, mapping, calibration[0])
    for batch in calibration:
        prepared(*batch)
    return convert(prepared)


def fit_classifier(features: Tensor, labels: Tensor, decay: float) -> nn.Linear:
    """Return the linear layer of logistic regression on rows of features.

    Args:
        features: [samples, features].
        labels: [samples], from 0 on.
        decay: factor of the squared weights in the loss.
    """
    # One factor for all: dead features would get huge weights by a deviation of their own.
    mean, deviation = features.mean(0), features.std()
    rows = (features - mean) / deviation
    layer = nn.Linear(rows.shape[1], int(labels.max()) + 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(layer(rows), labels) + decay * layer.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        layer.weight /= deviation
        layer.bias -= layer.weight @ mean
    return layer.requires_grad_(False)

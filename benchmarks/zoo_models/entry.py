"""What a model of the zoo is, and how the definitions of `transformers` become one.

The tests' tiny models are reused at larger sizes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from support import tiny_models

LAST: dict[str, Any] = {"memory_format": torch.channels_last}
Loss = Callable[[Any], Tensor]


def at_least_single(x: Tensor) -> Tensor:
    """Return `x` in fp32, or in fp64 if it has that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def squares(outputs: Any) -> Tensor:
    """Return the sum of the mean squares of all floating-point outputs."""
    leaves = [at_least_single(y) for y in tree_leaves(outputs) if y.is_floating_point()]
    return torch.stack([y.square().mean() for y in leaves]).sum()


def classes(logits: Tensor) -> Tensor:
    """Return the cross entropy of logits [..., classes] with labels that count upwards."""
    rows = at_least_single(logits).flatten(0, -2)
    return F.cross_entropy(rows, torch.arange(rows.shape[0], device=rows.device) % rows.shape[1])


def total(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the sum of losses that the model computes itself in training mode."""
    return torch.stack([at_least_single(y).mean() for y in tree_leaves(outputs)]).sum()


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        make: Builds the model in fp32 with random weights and without dropout.
        inputs: Makes the positional inputs for a batch size, which scales their first dimension.
        batch: The usual batch size.
        loss: The training loss of what the model returns.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    batch: int
    loss: Loss = squares


class Named(nn.Module):
    """A model of `transformers` whose inputs come by position; returns its first result."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return logits or states."""
        named = dict(zip(self.names, inputs, strict=True))
        result: Tensor = self.model(**named, return_dict=False)[0]
        return result


def known(
    name: str,
    inputs: Mapping[str, Callable[[int], Tensor]],
    batch: int,
    loss: Loss = classes,
    last: bool = False,
    **sizes: Any,
) -> Entry:
    """Return a tiny model of the tests as an entry, at other sizes."""
    tiny = tiny_models.MODELS[name]
    assert isinstance(tiny, tiny_models.Tiny)
    return of_transformers(replace(tiny, sizes={**tiny.sizes, **sizes}), inputs, batch, loss, last)


def of_transformers(
    kind: tiny_models.Tiny,
    inputs: Mapping[str, Callable[[int], Tensor]],
    batch: int,
    loss: Loss = classes,
    last: bool = False,
) -> Entry:
    """Return a model of `transformers` as an entry; `last`: channels-last."""

    def make() -> nn.Module:
        model = Named(kind(0.0), tuple(inputs))
        tiny_models.fill(model)
        return model.to(**LAST) if last else model

    def made(size: int) -> tuple[Tensor, ...]:
        tensors = tuple(each(size) for each in inputs.values())
        return tuple(x.to(**LAST) for x in tensors) if last else tensors

    return Entry(make, made, batch, loss)


def filled(kind: Callable[[], nn.Module], last: bool = False) -> Callable[[], nn.Module]:
    """Return a maker of that model whose weights all influence the result."""

    def make() -> nn.Module:
        model = kind()
        tiny_models.fill(model)
        return model.to(**LAST) if last else model

    return make


def normal(*shape: int) -> Callable[[int], Tensor]:
    """Return a maker of normal numbers [batch, *shape]."""
    return lambda batch: torch.randn(batch, *shape)


def numbers(high: int, *shape: int) -> Callable[[int], Tensor]:
    """Return a maker of integers below `high`, [batch, *shape]."""
    return lambda batch: torch.randint(high, (batch, *shape))


def together(*makers: Callable[[int], Tensor]) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a maker of all of these inputs."""
    return lambda batch: tuple(make(batch) for make in makers)


def image(channels: int, side: int, last: bool = False) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a maker of one image a row."""

    def make(batch: int) -> tuple[Tensor, ...]:
        x = torch.randn(batch, channels, side, side)
        return (x.to(**LAST) if last else x,)

    return make

"""Which optimizers can do what, by their exact type: a subclass may step in another way."""

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ipex_inductor.optim._lamb import Lamb
from ipex_inductor.optim._lars import Lars

# They update every parameter by itself, in one pass: a few at a time may be put together and cut.
SPLIT_OPTIMIZERS: frozenset[type[Optimizer]] = frozenset({SGD, Adagrad, Adam, AdamW, Lamb, Lars})

FUSED_OPTIMIZERS: frozenset[type[Optimizer]] = frozenset({SGD, Adagrad, Adam, AdamW, Lamb, Lars})


def names(kinds: frozenset[type[Optimizer]]) -> str:
    """For messages."""
    return ", ".join(sorted(kind.__name__ for kind in kinds))

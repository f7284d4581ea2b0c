"""Tables of optimizers by feature and exact type: a subclass may step in another way."""

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ipex_inductor.optim.optimizers._lamb import Lamb
from ipex_inductor.optim.optimizers._lars import Lars

# These update every parameter independently, in one pass, so chunks can be joined and split.
SPLIT_OPTIMIZERS: frozenset[type[Optimizer]] = frozenset({SGD, Adagrad, Adam, AdamW, Lamb, Lars})

FUSED_OPTIMIZERS: frozenset[type[Optimizer]] = frozenset({SGD, Adagrad, Adam, AdamW, Lamb, Lars})


def names(kinds: frozenset[type[Optimizer]]) -> str:
    """Return the names of `kinds`, sorted, for messages."""
    return ", ".join(sorted(kind.__name__ for kind in kinds))

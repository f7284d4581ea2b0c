"""Skip comparisons of weights' contents in calls between which no code of the user runs.

`generate` computes one token behind the other, and compares weights for the first of them. What
torch knows of a weight (its identity, version and address) is still compared in each call.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_untouched: ContextVar[bool] = ContextVar("weights are untouched", default=False)


@contextlib.contextmanager
def assume_untouched(is_untouched: bool = True) -> Iterator[None]:
    """Assume inside the block that weights on GPUs hold what they held in the call before.

    Args:
        is_untouched: False changes nothing.
    """
    token = _untouched.set(is_untouched or _untouched.get())
    try:
        yield
    finally:
        _untouched.reset(token)


def are_untouched() -> bool:
    """Return whether contents of weights need no comparison in this call."""
    return _untouched.get()

"""Reversible changes of attributes, made while an absent device is described."""

import contextlib
from collections.abc import Callable
from typing import Any


class Changes(contextlib.ExitStack):
    """Attributes that are restored at the end, or removed where there were none."""

    def set(self, owner: Any, **values: Any) -> None:
        """Set these attributes of `owner`, and restore the former values on exit."""
        for name, value in values.items():
            if name in vars(owner):
                self.callback(setattr, owner, name, vars(owner)[name])
            else:
                self.callback(delattr, owner, name)
            setattr(owner, name, value)


def always(answer: Any) -> Callable[..., Any]:
    """Return a function that takes any arguments and returns `answer`."""
    return lambda *_, **__: answer

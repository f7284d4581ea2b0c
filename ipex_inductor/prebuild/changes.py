"""What is changed in this process while a device that is not here is described, and put back."""

import contextlib
from collections.abc import Callable
from typing import Any


class Changes(contextlib.ExitStack):
    """Attributes that are put back at the end, or removed where there were none."""

    def set(self, owner: Any, **values: Any) -> None:
        """Give `owner` these attributes."""
        for name, value in values.items():
            if name in vars(owner):
                self.callback(setattr, owner, name, vars(owner)[name])
            else:
                self.callback(delattr, owner, name)
            setattr(owner, name, value)


def always(answer: Any) -> Callable[..., Any]:
    """A function of anything that gives `answer`."""
    return lambda *_, **__: answer

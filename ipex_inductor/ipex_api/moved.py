"""Old names of modules that documents named before they moved; they end with version 0.3."""

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

MOVED = {
    "ipex_inductor.compat_ipex": "ipex_inductor.ipex_api.compat_ipex",
    "ipex_inductor.ipex_names": "ipex_inductor.ipex_api.ipex_names",
    "ipex_inductor.parameter_wrapper": "ipex_inductor.ipex_api.parameter_wrapper",
    # Pickled optimizers name them.
    "ipex_inductor.optim._lamb": "ipex_inductor.optim.optimizers._lamb",
    "ipex_inductor.optim._lars": "ipex_inductor.optim.optimizers._lars",
}


class MovedModule(ModuleType):
    """A module under its old name, whose attributes are those of the new one.

    Modules are none of them: pickle asks each module of a process for torch.
    """

    def __getattr__(self, name: str) -> Any:
        # The import system asks for attributes of its own.
        if name.startswith("__") or name in sys.modules:
            raise AttributeError(name)
        home = MOVED[self.__name__]
        message = f"{self.__name__} is {home} now. Import that: the old name ends with version 0.3."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module(home), name)


def keep_old_names() -> None:
    """Make the old names importable; import nothing else."""
    for name in MOVED:
        sys.modules.setdefault(name, MovedModule(name))

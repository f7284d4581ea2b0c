"""`import intel_extension_for_pytorch as ipex` in old programs: `install()` makes it find us."""

import sys
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

import torch

from ipex_inductor.errors import AlreadyImportedError, NotCarriedError, NotCarriedImportError
from ipex_inductor.ipex_api import ipex_names
from ipex_inductor.reporting import decisions

PACKAGES = ("intel_extension_for_pytorch", "intel_pytorch_extension")  # the older name second

# What old programs call on torch.xpu, and torch may not have.
XPU_NAMES = (
    *("FP32MathMode", "amp", "fp32_math_mode", "get_fp32_math_mode", "memory_summary"),
    *("optimize", "set_fp32_math_mode"),
)


def install() -> tuple[str, ...]:
    """From now on this process imports us as `intel_extension_for_pytorch` (or by its older name).

    Every module and name of IPEX that docs/migrating.md calls working resolves; others raise
    `NotCarriedError` or `NotCarriedImportError` with the reason. Attaches to `torch.xpu` what torch
    lacks of `XPU_NAMES`, says so in the log, and returns those names; other names that only IPEX
    had there are answered in the same way. A second call does nothing.
    Raises `AlreadyImportedError` where IPEX itself has been imported.
    """
    loaded = sys.modules.get(PACKAGES[0]) or sys.modules.get(PACKAGES[1])
    if loaded is not None and not isinstance(loaded, _Module):
        todo = "Call install() before anything imports it."
        raise AlreadyImportedError("IPEX not to be imported yet", repr(loaded), todo)
    if _FINDER in sys.meta_path:
        return ()
    sys.meta_path.insert(0, _FINDER)
    missing = [name for name in XPU_NAMES if name not in vars(torch.xpu)]
    xpu = import_module(f"{PACKAGES[0]}.xpu")
    given = {name: getattr(xpu, name) for name in missing}
    given |= {"__getattr__": _of_torch_xpu} if "__getattr__" not in vars(torch.xpu) else {}
    for name, value in given.items():
        setattr(torch.xpu, name, value)
        _attached.append(name)
    decisions.log.info(
        "attached to torch.xpu, which lacks them: %s", ", ".join(missing) or "nothing"
    )
    return tuple(missing)


def uninstall() -> None:
    """Undo `install`: modules it made are forgotten, and `torch.xpu` loses what it was given."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    if isinstance(sys.modules.get(PACKAGES[0]) or sys.modules.get(PACKAGES[1]), _Module):
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
    while _attached:
        delattr(torch.xpu, _attached.pop())


def take_place(name: str) -> None:
    """`install`, and have the module `name`, just being imported, replaced by ours."""
    if name in PACKAGES:
        del sys.modules[name]
        install()
        import_module(name)


class _Module(ModuleType):
    """A module of IPEX: what the table of names has below it."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}".partition(".")[2]
        if path in ipex_names.modules():
            return import_module(f"{self.__name__}.{name}")
        entry = ipex_names.find(path)
        if entry is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if not entry.resolves:
            raise NotCarriedError(*_refusal(f"{self.__name__}.{name}", entry))
        found = entry.get()
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_below(self.__name__)})


class _Alias(InspectLoader):
    """Import a module of ours by the name that IPEX had for it, or run it as `python -m` does."""

    def __init__(self, home: str) -> None:
        self.home = home

    def exec_module(self, module: ModuleType) -> None:
        """Put the module itself in the place of the empty one that the import system made."""
        sys.modules[module.__name__] = import_module(self.home)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module, which runpy executes as `__main__`."""
        return self._loader().get_code(self.home)

    def get_source(self, fullname: str) -> str | None:
        """Return the source of the module."""
        return self._loader().get_source(self.home)

    def _loader(self) -> InspectLoader:
        spec = find_spec(self.home)
        loader = spec and spec.loader
        assert isinstance(loader, InspectLoader), self.home
        return loader


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a package for each module of IPEX, ours for one that is carried as a whole.

        Raises `NotCarriedImportError` with the reason for a name that is not carried.
        """
        package, _, name = fullname.partition(".")
        if package not in PACKAGES:
            return None
        if name in ipex_names.modules():
            return ModuleSpec(fullname, self, is_package=True)
        entry = ipex_names.find(name)
        if entry is None:
            return None
        if not entry.resolves:
            raise NotCarriedImportError(*_refusal(fullname, entry))
        return ModuleSpec(fullname, _Alias(entry.home)) if entry.is_module else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that looks names up when they are asked for."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """What `from ... import *` takes."""
        vars(module)["__all__"] = _below(module.__name__)


_FINDER = _Finder()
_attached: list[str] = []


def _of_torch_xpu(name: str) -> Any:
    """Return what IPEX had under `torch.xpu` and torch has not.

    Raises `NotCarriedError` with the reason where that is not carried.
    """
    if ipex_names.find(f"xpu.{name}") is None and f"xpu.{name}" not in ipex_names.modules():
        raise AttributeError(f"module 'torch.xpu' has no attribute {name!r}")
    return getattr(import_module(f"{PACKAGES[0]}.xpu"), name)


def _below(module: str) -> list[str]:
    """The names that resolve right below a module of IPEX."""
    path = module.partition(".")[2]
    entries = (
        entry.name.rpartition(".") for entry in ipex_names.names().values() if entry.resolves
    )
    return [name for parent, _, name in entries if parent == path and not name.startswith("_")]


def _refusal(name: str, entry: ipex_names.Name) -> tuple[str, str, str]:
    """Expected, came and what to do, for a name that old code cannot have."""
    todo = f"Use {entry.note}." if entry.kind == "instead" else entry.note
    return "a name of IPEX that works here", name, f"{todo} See {ipex_names.PAGE}."

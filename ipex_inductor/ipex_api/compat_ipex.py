"""`import intel_extension_for_pytorch as ipex` in old programs, resolved to this package."""

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

# Names of torch.xpu that old programs call and torch may lack.
XPU_NAMES = (
    *("FP32MathMode", "amp", "fp32_math_mode", "get_fp32_math_mode", "memory_summary"),
    *("optimize", "set_fp32_math_mode"),
)


def install() -> tuple[str, ...]:
    """Resolve imports of `intel_extension_for_pytorch` (or its older name) to this package.

    Every module and name of IPEX that docs/guides/migrating.md calls working resolves; all others
    raise with the reason. Names of `XPU_NAMES` that torch lacks are attached to `torch.xpu` and
    logged; other names that only IPEX had there are answered as in IPEX's modules. A second call
    does nothing.

    Returns:
        The names attached to `torch.xpu`.

    Raises:
        AlreadyImportedError: if IPEX itself has been imported.
        NotCarriedError: later, for a name that is not carried.
        NotCarriedImportError: later, for a module that is not carried.
    """
    loaded = sys.modules.get(PACKAGES[0]) or sys.modules.get(PACKAGES[1])
    if loaded is not None and not isinstance(loaded, _Module):
        advice = "Call install() before anything imports it."
        raise AlreadyImportedError("IPEX not to be imported yet", repr(loaded), advice)
    if _FINDER in sys.meta_path:
        return ()
    sys.meta_path.insert(0, _FINDER)
    missing = [name for name in XPU_NAMES if name not in vars(torch.xpu)]
    xpu = import_module(f"{PACKAGES[0]}.xpu")
    attributes = {name: getattr(xpu, name) for name in missing}
    attributes |= (
        {"__getattr__": _find_on_torch_xpu} if "__getattr__" not in vars(torch.xpu) else {}
    )
    for name, value in attributes.items():
        setattr(torch.xpu, name, value)
        _attached.append(name)
    decisions.log.info(
        "attached to torch.xpu, which lacks them: %s", ", ".join(missing) or "nothing"
    )
    return tuple(missing)


def uninstall() -> None:
    """Undo `install`: forget the modules it made, and detach its names from `torch.xpu`."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    if isinstance(sys.modules.get(PACKAGES[0]) or sys.modules.get(PACKAGES[1]), _Module):
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
    while _attached:
        delattr(torch.xpu, _attached.pop())


def take_place(name: str) -> None:
    """Call `install`, and replace the module `name`, which is just being imported."""
    if name in PACKAGES:
        del sys.modules[name]
        install()
        import_module(name)


class _Module(ModuleType):
    """A module of IPEX, with the names that the table lists below it."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}".partition(".")[2]
        if path in ipex_names.modules():
            return import_module(f"{self.__name__}.{name}")
        entry = ipex_names.find(path)
        if entry is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if not entry.resolves:
            raise NotCarriedError(*_refusal(f"{self.__name__}.{name}", entry))
        value = entry.get()
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_names_below(self.__name__)})


class _Alias(InspectLoader):
    """Import a module of this package by its IPEX name, or run it as `python -m` does."""

    def __init__(self, home: str) -> None:
        self.home = home

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module of the import system by the real one."""
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
    """Finder and loader of the modules of IPEX."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a package for each module of IPEX; this package's module if carried as a whole.

        Raises:
            NotCarriedImportError: with the reason, for a name that is not carried.
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
        """Return a module that resolves names on access."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set `__all__`, which `from ... import *` reads."""
        vars(module)["__all__"] = _names_below(module.__name__)


_FINDER = _Finder()
_attached: list[str] = []


def _find_on_torch_xpu(name: str) -> Any:
    """Return a name that IPEX had under `torch.xpu` and torch lacks.

    Raises:
        NotCarriedError: with the reason, if it is not carried.
        AttributeError: if IPEX had no such name.
    """
    if ipex_names.find(f"xpu.{name}") is None and f"xpu.{name}" not in ipex_names.modules():
        raise AttributeError(f"module 'torch.xpu' has no attribute {name!r}")
    return getattr(import_module(f"{PACKAGES[0]}.xpu"), name)


def _names_below(module: str) -> list[str]:
    """Return the names that resolve directly below a module of IPEX."""
    path = module.partition(".")[2]
    entries = (
        entry.name.rpartition(".") for entry in ipex_names.names().values() if entry.resolves
    )
    return [name for parent, _, name in entries if parent == path and not name.startswith("_")]


def _refusal(name: str, entry: ipex_names.Name) -> tuple[str, str, str]:
    """Return the three parts of the error for a name that is not carried."""
    advice = f"Use {entry.note}." if entry.kind == "instead" else entry.note
    return "a name of IPEX that works here", name, f"{advice} See {ipex_names.PAGE}."

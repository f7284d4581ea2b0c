"""What became of every public name of IPEX: works here, torch has it, or not carried.

The names stand in ipex_names.toml, without the package's own (`optimize`, `nn.FrozenBatchNorm2d`).
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from types import ModuleType
from typing import Any

from ipex_inductor import __version__, compat

VERSION = f"{compat.VERSION.partition('+')[0]}+ipex.inductor.{__version__}"
"""What programs compare with torch's version, as IPEX's had to agree with it."""

PAGE = "docs/migrating.md"
REST = ".*"  # at the end of a name: whatever is below and not listed


@dataclass(frozen=True)
class Name:
    """One name of IPEX: `kind` is "works", "torch" (handed on), "instead" or "not_carried".

    `home`: the full name that has it now, "" if none. `note`: how, or why not.
    """

    kind: str
    name: str
    home: str = ""
    note: str = ""

    @property
    def resolves(self) -> bool:
        """Whether old code gets an object, and not an error that says what to do."""
        return self.kind in ("works", "torch")

    @property
    def is_module(self) -> bool:
        """Return whether the name is that of a module, so that `import` finds it."""
        return self.resolves and isinstance(self.get(), ModuleType)

    def get(self) -> Any:
        """The object that `home` names."""
        return locate(self.home)


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("ipex_inductor.ipex_api").joinpath("ipex_names.toml").read_text("utf-8")
    return tomllib.loads(text)


@functools.cache
def names() -> Mapping[str, Name]:
    """Every name, in the order of the file."""
    data = _data()
    found = [Name(kind, *pair) for kind in ("works", "torch") for pair in data[kind].items()]
    for group in data["instead"]:
        found += [Name("instead", name, group["torch"], group["how"]) for name in group["names"]]
    for group in data["not_carried"]:
        found += [Name("not_carried", name, "", group["reason"]) for name in group["names"]]
    return {name.name: name for name in found}


@functools.cache
def modules() -> frozenset[str]:
    """What old code can import: "" for the package itself, and all that a name stands in."""
    parts = (name.split(".")[:-1] for name in names())
    return frozenset(".".join(part[:n]) for part in parts for n in range(len(part) + 1))


def find(name: str) -> Name | None:
    """Return the entry of `name`: its own, torch's where that has it, or that of what is around it.

    Names below one that resolves are not looked up here: they are the object's own.
    """
    if entry := names().get(name) or _handed_on(name):
        return entry
    parts = name.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
    spellings = (spelling for prefix in prefixes for spelling in (prefix, f"{prefix}{REST}"))
    entry = next((names()[spelling] for spelling in spellings if spelling in names()), None)
    return None if entry is None or entry.resolves else entry


def _handed_on(name: str) -> Name | None:
    """Return an entry for a name of a module that is torch's but for what the tables list."""
    for module, home in _data()["others"].items():
        if not name.startswith(f"{module}.") or name.startswith(f"{module}.__"):
            continue
        path = f"{home}{name.removeprefix(module)}"
        found: Any = import_module(home)
        for part in path.removeprefix(f"{home}.").split("."):
            found = vars(found).get(part) if isinstance(found, ModuleType) else None
        if found is not None:
            return Name("torch", name, path)
    return None


def locate(path: str) -> Any:
    """The object with this full name: its module is imported."""
    parts = path.split(".")
    found = import_module(parts[0])
    for number, part in enumerate(parts[1:], 1):
        if not hasattr(found, part):
            import_module(".".join(parts[: number + 1]))
        found = getattr(found, part)
    return found


def tables() -> dict[str, str]:
    """The tables of docs/migrating.md by kind, a row for all names that share an answer."""
    rows: dict[str, dict[tuple[str, str], list[str]]] = {}
    for entry in names().values():
        rows.setdefault(entry.kind, {}).setdefault((entry.home, entry.note), []).append(entry.name)
    return {kind: "\n".join(_row(*row) for row in found.items()) for kind, found in rows.items()}


def _row(answer: tuple[str, str], names: list[str]) -> str:
    home, note = answer
    cells = [", ".join(f"`{name}`" for name in names), f"`{home}`" * bool(home), note]
    return f"| {' | '.join(cell for cell in cells if cell)} |"


if __name__ == "__main__":
    for kind, table in tables().items():
        print(f"{kind}\n\n{table}\n")

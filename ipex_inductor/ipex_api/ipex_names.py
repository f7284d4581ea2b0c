"""Table of every public name of IPEX: it works here, torch has it, or it is not carried.

ipex_names.toml lists the names, without the package's own (`optimize`, `nn.FrozenBatchNorm2d`).
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
"""Version that programs compare with torch's, as the versions of IPEX and torch had to agree."""

PAGE = "docs/guides/migrating.md"
REST = ".*"  # suffix of a name: everything below it that is not listed


@dataclass(frozen=True)
class Name:
    """One name of IPEX; `kind` is "works", "torch" (resolves to torch), "instead" or "not_carried".

    `home`: full name of its object now, "" if none. `note`: how to replace it, or why it is
    missing.
    """

    kind: str
    name: str
    home: str = ""
    note: str = ""

    @property
    def resolves(self) -> bool:
        """Return True if old code gets an object instead of an error that gives advice."""
        return self.kind in ("works", "torch")

    @property
    def is_module(self) -> bool:
        """Return True if the name is that of a module, so that `import` finds it."""
        return self.resolves and isinstance(self.get(), ModuleType)

    def get(self) -> Any:
        """Return the object that `home` names."""
        return locate(self.home)


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("ipex_inductor.ipex_api").joinpath("ipex_names.toml").read_text("utf-8")
    return tomllib.loads(text)


@functools.cache
def names() -> Mapping[str, Name]:
    """Return every name, in the order of the file."""
    data = _data()
    entries = [Name(kind, *pair) for kind in ("works", "torch") for pair in data[kind].items()]
    for group in data["instead"]:
        entries += [Name("instead", name, group["torch"], group["how"]) for name in group["names"]]
    for group in data["not_carried"]:
        entries += [Name("not_carried", name, "", group["reason"]) for name in group["names"]]
    return {name.name: name for name in entries}


@functools.cache
def modules() -> frozenset[str]:
    """Return the importable modules: "" for the package itself, and all parents of names."""
    parts = (name.split(".")[:-1] for name in names())
    return frozenset(".".join(part[:n]) for part in parts for n in range(len(part) + 1))


def find(name: str) -> Name | None:
    """Return the entry of `name`: listed, torch's, or of its nearest parent that does not resolve.

    Names below one that resolves have no entry: they are attributes of its object.
    """
    if entry := names().get(name) or _find_in_torch(name):
        return entry
    parts = name.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
    spellings = (spelling for prefix in prefixes for spelling in (prefix, f"{prefix}{REST}"))
    entry = next((names()[spelling] for spelling in spellings if spelling in names()), None)
    return None if entry is None or entry.resolves else entry


def _find_in_torch(name: str) -> Name | None:
    """Return an entry for a name in a module that is torch's except for the listed names."""
    for module, home in _data()["others"].items():
        if not name.startswith(f"{module}.") or name.startswith(f"{module}.__"):
            continue
        path = f"{home}{name.removeprefix(module)}"
        value: Any = import_module(home)
        for part in path.removeprefix(f"{home}.").split("."):
            value = vars(value).get(part) if isinstance(value, ModuleType) else None
        if value is not None:
            return Name("torch", name, path)
    return None


def locate(path: str) -> Any:
    """Return the object with this full name; its module is imported."""
    parts = path.split(".")
    value = import_module(parts[0])
    for number, part in enumerate(parts[1:], 1):
        if not hasattr(value, part):
            import_module(".".join(parts[: number + 1]))
        value = getattr(value, part)
    return value


def tables() -> dict[str, str]:
    """Return the tables of docs/guides/migrating.md by kind, one row for names with one answer."""
    rows: dict[str, dict[tuple[str, str], list[str]]] = {}
    for entry in names().values():
        rows.setdefault(entry.kind, {}).setdefault((entry.home, entry.note), []).append(entry.name)
    return {kind: "\n".join(_row(*row) for row in groups.items()) for kind, groups in rows.items()}


def _row(answer: tuple[str, str], names: list[str]) -> str:
    home, note = answer
    cells = [", ".join(f"`{name}`" for name in names), f"`{home}`" * bool(home), note]
    return f"| {' | '.join(cell for cell in cells if cell)} |"


if __name__ == "__main__":
    for kind, table in tables().items():
        print(f"{kind}\n\n{table}\n")

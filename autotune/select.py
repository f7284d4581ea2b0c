"""What is known about problems: the best choice of each, and where that comes from.

The user's own records come first, then the tables that the package ships. What neither has is the
library's, or is measured first where that is allowed.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ipex_inductor.aot_cache.digest import digest_fields
from ipex_inductor.autotune import own
from ipex_inductor.autotune.cost import Model, load
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.pool import Estimate, pool
from ipex_inductor.autotune.record import Choice, encode
from ipex_inductor.autotune.space import of_this_torch
from ipex_inductor.autotune.table import file_name

SHIPPED = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Selection:
    """The choice for one problem: the estimates of it, and of the library's best, if any ran."""

    best: Estimate
    library: Estimate | None
    source: str  # "recorded", "shipped"

    @property
    def choice(self) -> Choice:
        """What is to be used."""
        return self.best.choice

    def __str__(self) -> str:
        """One line: what, how fast, against what, from where."""
        choice = self.choice
        given = "".join(f" {k}={v}" for k, v in choice.parameters.items())
        against = ""
        if self.library is not None and self.library.choice != choice:
            against = f", {self.library.choice.name} {self.library.p50:.4g}"
        return f"{choice.name}{given}: {self.best.p50:.4g} us{against}, {self.source}"


def lookup(problems: Collection[bytes], database: Path | None) -> dict[bytes, Selection]:
    """The selections of those `problems` (in canonical form) of which something is known.

    `database` is the user's, None for none. Where a template of another torch won, nothing is.
    """
    found: dict[bytes, Selection] = {}
    for source, folder in (("recorded", database), ("shipped", SHIPPED)):
        missing = [p for p in problems if p not in found]
        if missing and folder is not None and folder.exists():
            best = _best(missing, folder, source)
            found |= {key: each for key, each in best.items() if of_this_torch(each.choice)}
    return found


def shipped(arch: str) -> bool:
    """Whether the package has a table of that architecture."""
    return (SHIPPED / file_name(arch)).exists()


def cost_model(arch: str) -> Model | None:
    """The user's own model of that architecture, or the one that the package ships."""
    folders = [own.default_folder()] if own.trusted() else []
    return load([*folders, SHIPPED], arch)


def digest(selected: Iterable[tuple[bytes, Choice]]) -> str:
    """The identity of what was selected for a graph."""
    pairs = tuple(sorted((problem, encode(choice)) for problem, choice in selected))
    return digest_fields({"selected": pairs})


def _best(problems: Collection[bytes], folder: Path, source: str) -> dict[bytes, Selection]:
    found = {}
    for key, known in pool(Records(folder, only=problems)).items():
        best = known.best()
        if best is not None:
            libraries = [e for e in known.estimates().values() if e.choice.kind == "library"]
            found[key] = Selection(best, min(libraries, key=lambda e: e.p50, default=None), source)
    return found

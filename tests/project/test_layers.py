"""Who may import whom: the arrows of docs/architecture.md."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]

GROUND = {"errors", "config", "target", "reporting", "compat", "runtime"}
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "compat": {"errors"},
    "target": {"errors", "compat"},
    "reporting": {"errors"},
    "runtime": set(),
    "ops": set(),
    "aot_cache": set(),
    "templates": {"ops", "aot_cache"},
    "autotune": {"aot_cache"},
    "lowerings": {"templates", "autotune", "aot_cache", "ops"},
    "optim": {"templates"},
    "passes": {"ops", "templates"},
    "capture": set(),
    "compiler": {"passes", "lowerings", "autotune", "aot_cache", "ops", "capture"},
    "backend": {"compiler", "passes", "lowerings", "autotune", "aot_cache"},
    "frontend": {"optim"},
    "quantization": {"ops", "templates"},
    "llm": {"frontend", "ops", "quantization", "templates"},
    "inspection": {"backend", "capture", "quantization"},
    "nn": {"optim"},
    "cpu": set(),
    "launch": {"cpu"},
    "ipex_api": {"frontend", "optim"},
    "xpu": {"frontend", "ipex_api", "nn", "optim"},
    "as_ipex": {"ipex_api"},
    "prebuild": {"aot_cache", "backend", "compiler", "optim", "passes", "templates"},
    "cli": {
        *("aot_cache", "autotune", "compiler", "cpu", "inspection", "llm", "lowerings", "ops"),
        *("passes", "prebuild", "quantization", "templates"),
    },
}
ROOMS = ("ipex_inductor", "lowerings", "templates", "autotune", "aot_cache")
FILES = sorted(f for folder in ROOMS for f in (ROOT / folder).rglob("*.py"))
LARGEST = 26  # files in a folder
LOOSE = 8  # modules beside the folders of ipex_inductor/


def room(file):
    parts = file.resolve().relative_to(ROOT).parts
    return Path(parts[1] if parts[0] == "ipex_inductor" else parts[0]).stem


def imported(file):
    """Rooms of ours that a file imports, at any depth."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [node.module or ""]
            if node.module == "ipex_inductor":
                names = [f"ipex_inductor.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ipex_inductor" and len(parts) > 1:
                yield parts[1]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_arrows_go_one_way(file):
    here = room(file)
    if here in ("__init__", "__main__"):
        return
    allowed = MAY_IMPORT[here] | {here}
    if here not in GROUND:
        allowed |= GROUND
    rooms = set(MAY_IMPORT)
    assert {r for r in imported(file) if r in rooms} <= allowed


def folder_of(name):
    """Return the folder of a dotted module below ipex_inductor, with `/` between folders."""
    parts = name.split(".")
    path = (ROOT if f"{parts[0]}" in ROOMS else ROOT / "ipex_inductor").joinpath(*parts)
    while parts and not path.is_dir():
        path, parts = path.parent, parts[:-1]
    return "/".join(parts)


def test_folders_import_one_another_in_no_circle():
    arrows = {}
    for file in FILES:
        parts = file.resolve().relative_to(ROOT).parts
        parts = parts[1:] if parts[0] == "ipex_inductor" else parts
        here = "/".join(parts[:-1])
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            ours = [name.removeprefix("ipex_inductor.") for name in names]
            ours = [each for each, name in zip(ours, names, strict=True) if each != name]
            arrows.setdefault(here, set()).update({*map(folder_of, ours)} - {here, ""})
    arrows.pop("")  # what users import stands above all
    while arrows:
        last = {here for here, there in arrows.items() if not there & arrows.keys()}
        assert last, f"a circle among some of {sorted(arrows)}, others import it"
        arrows = {here: there for here, there in arrows.items() if here not in last}


def test_no_folder_is_a_heap():
    count = Counter(str(file.parent.relative_to(ROOT)) for file in FILES if not file.is_symlink())
    assert count["ipex_inductor"] <= LOOSE
    assert not {f for f, n in count.items() if n > LARGEST}


def test_the_walk_sees_every_room():
    assert {room(f) for f in FILES} >= set(MAY_IMPORT)


@pytest.mark.parametrize(
    "pattern", [r"torch\.__version__", r"TorchVersion", r"except.*ImportError"]
)
def test_versions_are_compats_business(pattern):
    others = (f for f in FILES if room(f) != "compat")
    guilty = {f.name for f in others if re.search(pattern, f.read_text())}
    if "Import" in pattern:  # whether a package is there at all, or a module the user named
        guilty -= {"doctor.py", "models.py"}
    assert not guilty

"""Who may import whom: the arrows of docs/architecture.md."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GROUND = {
    *("errors", "config", "target", "decisions", "compat", "levels", "openmp", "weight_memory"),
    "listing",
}
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "target": {"errors"},
    "decisions": {"errors"},
    "compat": {"errors"},
    "levels": {"errors", "target", "compat"},
    "openmp": set(),
    "weight_memory": set(),
    "listing": set(),
    "ops": set(),
    "aot_cache": set(),
    "templates": {"ops", "aot_cache"},
    "autotune": {"aot_cache", "templates"},
    "lowerings": {"templates", "autotune", "aot_cache", "ops"},
    "optim": {"ops", "templates", "autotune", "aot_cache"},
    "passes": {"ops", "templates"},
    "capture": set(),
    "timed_kernels": set(),
    "graph_files": {"aot_cache", "timed_kernels"},
    "kernel_header": {"aot_cache"},
    "collector": set(),
    "progress": {"graph_files"},
    "arguments": set(),
    "recording": {"arguments"},
    "request": {"graph_files", "lowerings", "autotune", "aot_cache"},
    "inner": {"collector", "graph_files", "progress", "passes", "lowerings", "autotune", "capture"},
    "outer": {"request", "graph_files", "inner", "passes", "lowerings", "autotune", "ops"},
    "choices": {"request", "graph_files", "outer", "inner", "lowerings", "autotune"},
    "plain_graph": {"request", "passes"},
    "backend": {
        *("collector", "request", "graph_files", "choices", "outer", "passes", "lowerings"),
        *("recording", "autotune", "aot_cache", "plain_graph", "kernel_header", "progress"),
    },
    "frontend": {"collector", "passes", "optim"},
    "watch": {"backend"},
    "explanation": {"watch", "capture"},
    "math_mode": set(),
    "nn": {"ops", "optim"},
    "cpu": set(),
    "launch": {"cpu"},
    "switches": set(),
    "memory_table": set(),
    "xpu": {"frontend", "math_mode", "memory_table", "nn", "optim"},
    "parameter_wrapper": {"frontend", "optim"},
    "ipex_names": set(),
    "compat_ipex": {"ipex_names"},
    "old_names": {"compat_ipex"},
    "as_ipex": {"compat_ipex", "old_names"},
    "prebuild": {
        *("aot_cache", "arguments", "backend", "choices", "collector", "graph_files", "inner"),
        *("optim", "passes", "templates"),
    },
    "cli": {
        *("aot_cache", "choices", "autotune", "explanation", "lowerings", "passes", "prebuild"),
        *("templates", "watch", "cpu"),
    },
}
ROOMS = ("ipex_inductor", "lowerings", "templates", "autotune", "aot_cache")
FILES = sorted(f for folder in ROOMS for f in (ROOT / folder).rglob("*.py"))


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


def test_the_walk_sees_every_room():
    assert {room(f) for f in FILES} >= set(MAY_IMPORT)


@pytest.mark.parametrize(
    "pattern", [r"torch\.__version__", r"TorchVersion", r"except.*ImportError"]
)
def test_versions_are_compats_business(pattern):
    others = (f for f in FILES if room(f) != "compat")
    guilty = {f.name for f in others if re.search(pattern, f.read_text())}
    if "Import" in pattern:  # whether a package is there at all, or a module the user named
        guilty -= {"doctor.py", "demo_models.py"}
    assert not guilty

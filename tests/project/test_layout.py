"""One namespace: four linked rooms, no bare names, and three lists of packages that agree."""

import os
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest

from ipex_inductor.aot_cache.digest import ROOMS, SUFFIXES, sources
from ipex_inductor.autotune.select import SHIPPED

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
LINKED = ("aot_cache", "autotune", "lowerings", "templates")
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

IMPORT_ALL = """
import importlib, pkgutil, sys
import ipex_inductor
found = pkgutil.walk_packages(ipex_inductor.__path__, "ipex_inductor.")
for name in sorted(m.name for m in found if not m.name.endswith("__main__")):
    assert importlib.import_module(name).__name__ == name, name
    print(name)
assert not set(sys.argv[1:]) & sys.modules.keys(), set(sys.argv[1:]) & sys.modules.keys()
"""


def packages_on_disk():
    """Dotted names of all folders below ipex_inductor/, links followed, but for those of data."""
    for folder, below, _ in os.walk(ROOT / "ipex_inductor", followlinks=True):
        below[:] = [name for name in below if name not in ("__pycache__", SHIPPED.name)]
        yield ".".join(Path(folder).relative_to(ROOT).parts)


def test_packages_are_the_same_on_disk_in_pyproject_and_in_the_digest():
    assert sorted(packages_on_disk()) == sorted(SETUP["packages"]) == sorted(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_an_ordinary_package(room):
    spec = find_spec(room)
    assert spec.origin is not None, f"{room} has no __init__.py"
    assert spec.name.split(".")[0] == "ipex_inductor"


@pytest.mark.parametrize("room", LINKED)
def test_the_links_are_relative_and_in_the_package_map(room):
    link = ROOT / "ipex_inductor" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"
    assert (ROOT / room).is_dir()
    assert SETUP["package-dir"][f"ipex_inductor.{room}"] == room


def test_no_other_room_is_linked_or_mapped():
    links = {p.name for p in (ROOT / "ipex_inductor").iterdir() if p.is_symlink()}
    assert links == set(LINKED)
    assert set(SETUP["package-dir"].values()) == set(LINKED)


def test_wheels_carry_every_source_that_is_not_python():
    carried = SETUP["package-data"]
    for room, file in sources():
        patterns = [*carried.get(room, ()), *carried.get("", ()), *carried.get("*", ())]
        assert file.suffix == ".py" or any(fnmatch(file.name, p) for p in patterns), file


def test_every_kind_of_carried_file_is_digested():
    """But for tables: what of them concerns a graph is in that graph's key, and no more."""
    kinds = {Path(p).suffix for patterns in SETUP["package-data"].values() for p in patterns}
    tables = {".json", ".jsonl"}
    assert kinds - {".typed", *tables} <= SUFFIXES
    assert {file.suffix for file in SHIPPED.iterdir()} == tables
    assert not tables & {*SUFFIXES}


def test_everything_imports_under_its_full_name_only():
    command = [sys.executable, "-c", IMPORT_ALL, *LINKED]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert set(ROOMS) - {"ipex_inductor"} <= set(names)
    assert all(name.startswith("ipex_inductor.") for name in names)

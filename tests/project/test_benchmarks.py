"""Benchmarks can be started: nobody runs them often, and what they import goes on changing."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "benchmarks"
WORKS_AT_ONCE = {"warm_start_program"}  # tests/end_to_end/test_warm_start.py runs it
FOLDERS = (FOLDER, *(FOLDER / name for name in ("common", "ops", "startup", "studies")))
OPTIONS = re.compile(r"(argparse|make_parser)\b.*^if __name__", re.DOTALL | re.MULTILINE)
SCRIPTS = [
    path
    for folder in FOLDERS
    for path in sorted(folder.glob("*.py"))
    if path.stem not in {"__init__", "__main__", *WORKS_AT_ONCE}
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.stem}-{path.stem}")
def test_it_is_imported_and_tells_its_options(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))  # seldom there
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(script.parent)
    if OPTIONS.search(script.read_text()):
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(script), run_name="__main__")
        assert f"usage: {script.name}" in capsys.readouterr().out
    else:
        runpy.run_path(str(script))


@pytest.mark.slow  # a minute
def test_a_packages_start_is_measured(tmp_path):
    """ResNet-50: its output is held against eager mode's, and nothing of Dynamo is imported."""
    pytest.importorskip("transformers")
    command = [sys.executable, str(FOLDER / "studies" / "package_start.py"), "--rounds", "1"]
    env = os.environ | {"IPEX_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w[ \w]*?) +best", done.stdout, re.M) == [
        *("state dict", "load", "first run", "wall", "cpu")
    ]


def test_functions_that_are_timed_exist():
    """Parts of `startup compile` are looked up by names of private functions."""
    parts = runpy.run_path(str(FOLDER / "startup" / "compile.py"))["PARTS"]
    for place in parts.values():
        module, _, path = place.partition(":")
        found = importlib.import_module(f"ipex_inductor.{module}")
        for name in path.split("."):
            found = getattr(found, name)
        assert callable(found), place

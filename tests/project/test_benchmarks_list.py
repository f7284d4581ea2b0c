"""`python -m benchmarks` lists every benchmark and starts the one that is named."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
# Not `import benchmarks`: another package of that name may be installed.
spec = importlib.util.spec_from_file_location("benchmarks_main", FOLDER / "__main__.py")
main = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main)
ALL = main.entries() | main.studies()
LISTED = main.list_benchmarks()  # which parses every script


def test_every_script_is_an_entry_or_a_study():
    scripts = {path for folder in (".", "ops", "startup") for path in FOLDER.glob(f"{folder}/*.py")}
    scripts |= {*(FOLDER / "studies").glob("*.py"), *(FOLDER / "studies").glob("*.sh")}
    assert {*ALL.values()} == {path for path in scripts if not path.stem.startswith("__")}


@pytest.mark.parametrize("name", ALL)
def test_it_is_described_in_one_line(name):
    about = main.describe(ALL[name])
    assert re.fullmatch(r"[A-Z].{20,96}\.", about), about
    assert f"  {name} " in LISTED
    assert about in LISTED


def test_the_readme_has_a_row_for_each():
    readme = (FOLDER / "README.md").read_text()
    assert re.findall(r"^\| (\w+) \| .+\? \|", readme, re.M) == [*main.studies()]
    assert all(f"`{name}`" in readme for name in main.entries())
    commands = re.findall(r"`python -m benchmarks (\w+)", readme)
    assert {*commands} - {"NAME"} == {*main.studies()}


def test_the_list_is_printed_without_torch():
    code = (
        "import runpy, sys; sys.argv = ['benchmarks']; sys.modules['torch'] = None\n"
        "runpy.run_module('benchmarks', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == main.list_benchmarks() + "\n"


@pytest.mark.parametrize(
    ("words", "script", "arguments"),
    [
        (["cpu", "--threads", "1"], "cpu.py", ["--threads", "1"]),
        (["ops", "conv", "--help"], "ops/conv.py", ["--help"]),
        (["winograd"], "studies/winograd.py", []),
        (["compat", "x"], "studies/compat.sh", ["x"]),
    ],
)
def test_a_name_finds_its_script(words, script, arguments):
    assert main.find_script(words) == (FOLDER / script, arguments)


@pytest.mark.parametrize(("name", "hint"), [("ops", "ops conv, ops linear"), ("nothing", "list")])
def test_an_unknown_name_is_an_error(name, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main([name])
    assert hint in capsys.readouterr().err


def test_a_named_benchmark_runs():
    command = [sys.executable, "-m", "benchmarks", "startup", "warm", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--rounds" in done.stdout


def test_rows_name_the_command_that_repeats_them(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from common.command import command_line

    script = str(FOLDER / "ops" / "conv.py")
    monkeypatch.setattr(sys, "argv", [script, "--only", "a b", "--json", "out"])
    assert command_line(("--json", "out")) == "python -m benchmarks ops conv --only 'a b'"
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "studies" / "winograd.py")])
    assert command_line() == "python -m benchmarks winograd"

"""README.md: its results come from the rows, it stays short, and what it names exists."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ipex_inductor.cli import app

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LINES = README.splitlines()
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.S)
PROSE = FENCE.sub("", README)
COMMANDS = [
    line.partition("#")[0].split()
    for language, text in FENCE.findall(README)
    if not language
    for line in text.splitlines()
]
spec = importlib.util.spec_from_file_location(
    "readme_table", ROOT / "benchmarks" / "studies" / "readme_table.py"
)
readme_table = importlib.util.module_from_spec(spec)
sys.modules["readme_table"] = readme_table  # where dataclasses look for it
spec.loader.exec_module(readme_table)
FILES = readme_table.make_files()


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_results_are_as_the_rows_give(file):
    assert file.read_text() == FILES[file], "run: python -m benchmarks readme_table"


def test_the_check_reports_a_stale_file(monkeypatch, tmp_path):
    stale = tmp_path / "README.md"
    stale.write_text(README.replace("| ResNet-50 | bf16 |", "| ResNet-50 | bf17 |"))
    monkeypatch.setattr(readme_table, "README", stale)
    monkeypatch.setattr(sys, "argv", ["readme_table", "--check"])
    with pytest.raises(SystemExit, match=r"not as the rows give: README\.md$"):
        readme_table.main()


def test_a_cpu_figure_is_of_the_last_run():
    rows = map(json.loads, (readme_table.RESULTS / "cpu.jsonl").read_text().splitlines())
    kind = {"model": "bert", "dtype": "fp32", "batch": 1, "flags": "avx2", "threads": 2}
    last = {row["peer"]: row for row in rows if kind.items() <= row.items()}
    _, ratios = readme_table.read_cpu_ratios("avx2", "avx512f")
    expected = [last[p]["min_ms"] / last["ipex"]["min_ms"] for p in ("inductor", "ipex28-trace")]
    assert ratios["bert", "fp32"].date == last["ipex"]["date"]
    assert str(ratios["bert", "fp32"]) == "{:.2f} ({:.2f})".format(*expected)


def test_a_gpu_figure_is_of_a_run_beside_max_autotune():
    """Rows of other runs say nothing about Inductor's best mode: DenseNet-121 has no such run."""
    ratios = readme_table.read_gpu_ratios()
    assert ("resnet50", "bf16") in ratios
    assert ("timm:densenet121", "bf16") not in ratios
    assert "DenseNet" not in readme_table.make_table(readme_table.read_columns())


@pytest.mark.parametrize("ratio", [0.5, 0.99, 1, 2, 50])
def test_bars_stay_within_the_axis(ratio):
    palette = readme_table.PALETTES["light"]
    rect, text = readme_table.draw_bar(0, 0, ("inductor", ratio), palette)
    x, width = (float(v) for v in re.findall(r' (?:x|width)="([\d.]+)"', rect))
    assert 0 <= x < x + width <= readme_table.place_ratio(readme_table.MOST)
    assert ("→" in text) == (ratio > readme_table.MOST)


def test_it_is_short():
    blocks = re.split(r"\n\s*\n|\n(?=[-*#|] )", PROSE)
    longest = max(len(b.split()) for b in blocks if not b.lstrip().startswith(("|", "#")))
    assert len(LINES) <= 200
    assert max(map(len, LINES)) <= 300
    assert longest <= 70
    assert len(re.findall(r"\d+\.\d", PROSE)) <= 60


def test_it_begins_with_how_to_install():
    assert any("pip install ipex-inductor" in line for line in LINES[:40])


def test_its_extras_are_all_that_users_need():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = takewhile(
        lambda line: line.startswith("|"), LINES[LINES.index("| Extra | adds |") + 2 :]
    )
    named = [name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    extras = project["optional-dependencies"].keys() - {"test", "dev", "docs", "accuracy"}
    assert sorted(named) == sorted(extras)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_its_commands_exist(words):
    if words[0] == "ipex-inductor":
        shown = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "100"})
        assert shown.exit_code == 0
        assert all(word in shown.output for word in words if word.startswith("--"))
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
    elif words[0] == "python":
        assert importlib.util.find_spec(words[2])
    else:
        assert words[:2] == ["pip", "install"]


def test_its_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(links) > 15
    missing = [link for link in links if not (ROOT / link).exists()]
    if not (ROOT / "docs" / "guides").exists():  # a checkout without the guides
        missing = [link for link in missing if not re.match(r"docs/(guides|install|quick)", link)]
    assert not missing


def test_benchmarks_it_names_exist():
    names = re.findall(r"python -m benchmarks (\w+)", README)
    listed = subprocess.run(
        [sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert names
    assert all(f"  {name} " in listed for name in names)

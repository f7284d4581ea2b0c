"""The sdist and the wheel hold the product and nothing else, and the quickstart runs from them."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ipex_inductor

ROOT = Path(__file__).parents[2]
ROOMS = ("lowerings", "templates", "autotune", "aot_cache")
FOLDERS = ("ipex_inductor", *ROOMS)
VERSION = ipex_inductor.__version__
DATA = {".cpp", ".jinja", ".json", ".jsonl", ".toml", ".typed"}
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def list_product():
    """Return the product's files by their paths in a checkout."""
    files = (
        Path(place, name).relative_to(ROOT)
        for folder in FOLDERS
        for place, _, names in os.walk(ROOT / folder)  # links are not followed
        for name in names
    )
    kept = (file for file in files if "__pycache__" not in file.parts)
    return sorted(map(str, (file for file in kept if file.suffix in DATA | {".py"})))


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist of a copy of the checkout, and the wheel of that sdist."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("distributions")
    tree, out = folder / "tree", folder / "dist"
    for name in (*FOLDERS, "docs", "benchmarks/common"):
        skip = shutil.ignore_patterns("__pycache__", "*.tmp*")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    run([sys.executable, "-c", BUILD, out], cwd=tree)
    sdist = out / f"ipex_inductor-{VERSION}.tar.gz"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", out, sdist], cwd=folder)
    return sdist, out / f"ipex_inductor-{VERSION}-py3-none-any.whl"


def test_the_sdist_holds_the_product(distributions):
    with tarfile.open(distributions[0]) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
    base = f"ipex_inductor-{VERSION}/"
    names = {member.name.removeprefix(base) for member in members}
    made = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert sorted(names - made - {"pyproject.toml", "LICENSE", "README.md"}) == list_product()


def test_the_wheel_holds_the_product(distributions):
    with zipfile.ZipFile(distributions[1]) as archive:
        names = {*archive.namelist()}
    rooms = re.compile(rf"^({'|'.join(ROOMS)})/")
    about = f"ipex_inductor-{VERSION}.dist-info"
    files = {name for name in names if not name.startswith(about)}
    assert sorted(files) == sorted(rooms.sub(r"ipex_inductor/\1/", name) for name in list_product())
    held = {name.removeprefix(f"{about}/") for name in names - files}
    assert held >= {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def test_the_wheel_says_what_it_is(distributions):
    with zipfile.ZipFile(distributions[1]) as archive:
        about = f"ipex_inductor-{VERSION}.dist-info"
        metadata = archive.read(f"{about}/METADATA").decode()
        points = archive.read(f"{about}/entry_points.txt").decode()
    assert f"\nVersion: {VERSION}\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert (ROOT / "README.md").read_text() in metadata
    assert "ipex-inductor = ipex_inductor.cli:app" in points
    assert "ipex = ipex_inductor.backend:compile_graph" in points


@pytest.mark.slow
def test_the_quickstart_runs_from_the_wheel(distributions, tmp_path):
    site = tmp_path / "site"
    options = ["--no-deps", "--no-index", "--quiet", "--target", site]
    run([sys.executable, "-m", "pip", "install", *options, distributions[1]])
    (code,) = re.findall(
        r"## Quickstart\n+```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    program = tmp_path / "quickstart.py"
    program.write_text(f"{code}\nprint(ipex_inductor.__file__)\n")
    variables = {**os.environ, "PYTHONPATH": str(site), "IPEX_HOME": str(tmp_path / "home")}
    printed = run([sys.executable, program], cwd=tmp_path, env=variables)
    assert "torch.Size([8, 10])" in printed
    assert str(site) in printed

"""Digests: of sources (the same in every layout) and of key fields (no two inputs collide)."""

import os
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ipex_inductor.aot_cache.digest import ROOMS, SUFFIXES, digest_fields, source_digest, sources
from ipex_inductor.errors import IpexError

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]

PRINT = "from ipex_inductor.aot_cache.digest import source_digest; print(source_digest())"
PINNED = "77b2731aed3b9c80ad2991a9600c6a03cdde6463d7b81edaf0e27ca41d109400"
# Appends a byte to source files in turn; prints the number of all, of those, and of digests.
CENSUS = """
import os
from ipex_inductor.aot_cache.digest import source_digest, sources
files, seen = [f for _, f in sources()], {source_digest()}
tried = files[:: int(os.environ["EVERY"])]
for file in tried:
    before = file.read_bytes()
    file.write_bytes(before + b"#")
    seen.add(source_digest.__wrapped__())
    file.write_bytes(before)
print(len(files), len(tried), len(seen), source_digest.__wrapped__() == source_digest())
"""
# Adds, renames and moves a file in the folder that is given; prints the number of digests.
MOVED = """
import os
from pathlib import Path
from ipex_inductor.aot_cache.digest import source_digest
root, seen = Path(os.environ["ROOT"]), {source_digest()}
(root / "lowerings" / "extra.py").write_text("x = 1")
seen.add(source_digest.__wrapped__())
for folder in ("lowerings", "templates"):
    (file,) = root.glob("*/extra*.py")
    file.rename(root / folder / "extra2.py")
    seen.add(source_digest.__wrapped__())
print(len(seen))
"""


def python(code, path, **env):
    variables = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "IPEX_HOME"}}
    variables |= {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1", **env}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout (links kept), free to be edited and built."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("ipex_inductor", "aot_cache", "autotune", "lowerings", "templates"):
        skip = shutil.ignore_patterns("__pycache__", "*.tmp*")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        (copy / name).write_text((ROOT / name).read_text() if (ROOT / name).exists() else "")
    return copy


def test_it_is_a_sha256_and_stable():
    assert len(source_digest()) == 64
    assert source_digest() == source_digest.__wrapped__()


def test_every_room_takes_part_and_only_sources_do():
    found = list(sources())
    assert {room for room, _ in found} == set(ROOMS)
    assert {file.suffix for _, file in found} <= SUFFIXES
    assert not any("__pycache__" in file.parts for _, file in found)


# Each time all files are read: quickly for some of them, of every folder.
@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_one_byte_anywhere_changes_it(tree, every):
    files, tried, digests, restored = python(CENSUS, tree, EVERY=str(every)).split()
    assert int(files) == len(list(sources())) >= 20
    assert int(tried) >= int(files) / every
    assert int(digests) == int(tried) + 1
    assert restored == "True"


def test_place_hash_seed_and_locale_do_not_change_it(tree, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(tree, moved, symlinks=True)
    (moved / "ipex_inductor" / "__pycache__").mkdir()
    (moved / "ipex_inductor" / "__pycache__" / "x.py").write_text("")
    (moved / "lowerings" / "notes.txt").write_text("not a source")
    (moved / "lowerings" / ".#lock.py").symlink_to("nowhere")  # an editor's lock
    first = python(PRINT, tree, PYTHONHASHSEED="1")
    assert first == python(PRINT, moved, PYTHONHASHSEED="2", LC_ALL="C")


def test_renaming_or_moving_a_file_changes_it(tree, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(tree, moved, symlinks=True)
    assert python(MOVED, moved, ROOT=str(moved)) == "4"


@pytest.mark.slow  # 15 s of pip; files of distributions: test_distributions.py
def test_a_wheel_has_the_same_digest_as_the_checkout(tree, tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(tree, source, symlinks=True)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", site, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (site / "ipex_inductor" / "lowerings").is_symlink()
    assert python(PRINT, site) == python(PRINT, tree)


def test_sources_are_ordered_by_package_and_name():
    found = [(room, file.name) for room, file in sources()]
    assert found == sorted(found)


def test_the_package_a_file_is_in_counts(monkeypatch):
    def digest(room):
        monkeypatch.setattr(f"{source_digest.__module__}.sources", lambda: [(room, Path(__file__))])
        return source_digest.__wrapped__()

    assert digest("ipex_inductor.ops") != digest("ipex_inductor.passes")


def test_a_missing_room_is_a_typed_error(monkeypatch):
    monkeypatch.setattr("ipex_inductor.aot_cache.digest.ROOMS", ("ipex_inductor.nowhere",))
    with pytest.raises(IpexError, match=r"expected the package ipex_inductor[.]nowhere"):
        source_digest.__wrapped__()


# --- fields

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4).map(tuple), max_leaves=12)
names = st.text(max_size=4)
field_maps = st.dictionaries(names, values, max_size=4)


def exact(value):
    """Equality that tells types, signs of zero and nesting apart; all NaN are one."""
    if isinstance(value, tuple):
        return ("tuple", *map(exact, value))
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


@given(field_maps, field_maps)
@example({"a": "ab", "b": "c"}, {"a": "a", "b": "bc"})
@example({"a": 1}, {"a": True})
@example({"a": 1}, {"a": 1.0})
@example({"a": 1}, {"a": "1"})
@example({"a": "1"}, {"a": b"1"})
@example({"a": None}, {"a": "None"})
@example({"a": None}, {"a": ""})
@example({"a": None}, {})
@example({"a": 0.0}, {"a": -0.0})
@example({"a": 0.0}, {"a": float("nan")})
@example({"a": ()}, {"a": ((),)})
@example({"a": ((1, 2), 3)}, {"a": (1, (2, 3))})
@example({"a": (1, 2)}, {"a": (2, 1)})
@example({"a": 1, "b": 2}, {"b": 2, "a": 1})
@example({"ab": "c"}, {"a": "bc"})
@example({"a": "\ud800"}, {"a": "\ud801"})
@example({"a": -1}, {"a": 255})
@example({"a": 10**5000}, {"a": 10**5000 + 1})
def test_digests_are_equal_exactly_when_the_fields_are(one, two):
    same = [(n, exact(v)) for n, v in one.items()] == [(n, exact(v)) for n, v in two.items()]
    assert (digest_fields(one) == digest_fields(two)) == same


def test_the_digest_of_given_fields_does_not_drift():
    fields = {"arch": "sm_90", "stages": 4, "eps": 1e-5, "bias": None, "shape": (8, True, b"x")}
    assert digest_fields(fields) == PINNED


class Wave(IntEnum):
    """An int by inheritance, whose meaning may change while its number does not."""

    A = 1


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ([1], "list"),
        ({}, "dict"),
        ({1}, "set"),
        (1j, "complex"),
        (Wave.A, "Wave"),
        (Path("/x"), "PosixPath"),
        ((1, ("a", [2])), "list"),
        (int, "type"),
    ],
)
def test_an_unknown_type_is_an_error_that_names_field_and_type(value, name):
    with pytest.raises(TypeError, match=rf"^field 'tile': no digest of {name}$"):
        digest_fields({"ok": 1, "tile": value})


def test_a_name_must_be_text():
    with pytest.raises(TypeError, match="no digest of object"):
        digest_fields({object(): 1})

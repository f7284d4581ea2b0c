"""What importing costs, and what it must not do."""

import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from types import ModuleType

import pytest

import ipex_inductor
from ipex_inductor.ipex_api import moved

pytestmark = pytest.mark.unit

IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
from types import ModuleType
import ipex_inductor
spent = time.perf_counter() - start
print(json.dumps([spent, sorted(set(sys.modules) - before)]))
"""


def python(code, **env):
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_is_quick_and_light():
    runs = [json.loads(python(IMPORT)) for _ in range(3)]
    assert statistics.median(spent for spent, _ in runs) < 0.150
    assert not [m for m in runs[0][1] if m.startswith(("torch._inductor", "triton", "rich"))]


def test_import_makes_no_folder(tmp_path):
    python(
        "import torch, ipex_inductor",
        HOME=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "torch"),
    )
    assert not list(tmp_path.iterdir())


def test_torch_lists_the_backend_without_importing_us():
    code = (
        "import sys, torch; print('ipex' in torch._dynamo.list_backends(),"
        " any(m.startswith('ipex_inductor') for m in sys.modules))"
    )
    assert python(code).split() == ["True", "False"]


@pytest.mark.parametrize("name", sorted(moved.MOVED))
def test_a_module_that_moved_is_found_by_its_old_name(name):
    old, new = importlib.import_module(name), importlib.import_module(moved.MOVED[name])
    public = {each: value for each, value in vars(new).items() if not each.startswith("_")}
    names = [each for each, value in public.items() if not isinstance(value, ModuleType)]
    assert names
    with pytest.warns(DeprecationWarning, match=re.escape(moved.MOVED[name])):
        assert all(getattr(old, each) is getattr(new, each) for each in names)
    package, _, last = name.rpartition(".")
    if package == "ipex_inductor":  # the others are named by pickles alone
        assert getattr(ipex_inductor, last) is old
    with pytest.raises(AttributeError), pytest.warns(DeprecationWarning, match="is ipex"):
        old.no_such_name  # noqa: B018


def test_old_module_names_end_with_the_version_that_they_announce():
    announced = re.search(r"end with version (\d+)\.(\d+)", moved.__doc__)
    assert [*map(int, announced.groups())] > [*map(int, ipex_inductor.__version__.split(".")[:2])]

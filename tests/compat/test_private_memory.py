"""Torch's private memory is read behind one door; shut, torch's public calls are used instead."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ipex_inductor.compat import private_memory
from ipex_inductor.compat.private_memory import fields, switch
from ipex_inductor.errors import OptionError
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.tensor_reader import accesses_cpp, freed, look_cpp, weights_cpp

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
ROOMS = ("ipex_inductor", "lowerings", "templates", "autotune", "aot_cache")
DOOR = ROOT / "ipex_inductor" / "compat" / "private_memory"
CACHED = (private_memory.layout, private_memory.why_not, weights_cpp.reader, look_cpp.reader)


@pytest.fixture
def fresh():
    """Nothing that was found before is known, nor is it afterwards."""
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def assert_shut(reason):
    assert weights_cpp.reader() is None
    assert reason in look_cpp.reader()
    with torch.no_grad():
        weight = torch.nn.Parameter(torch.ones(64))
        assert reason in freed.free([weight])
        assert weight.sum() == 64  # its data is there


@pytest.mark.usefixtures("fresh")
def test_the_door_is_open():
    assert isinstance(private_memory.layout(), private_memory.Layout)
    assert weights_cpp.reader() is not None
    assert isinstance(look_cpp.reader(), look_cpp.Reader)


@pytest.mark.usefixtures("fresh")
def test_the_switch_shuts_all_of_it(monkeypatch):
    monkeypatch.setenv("IPEX_PRIVATE_MEMORY", "0")
    assert_shut("IPEX_PRIVATE_MEMORY is 0")
    with pytest.raises(NotBuiltError, match="IPEX_PRIVATE_MEMORY is 0"):
        accesses_cpp.note_accesses(*[print] * 5, {})
    assert private_memory.method_definition("numpy") is None


@pytest.mark.usefixtures("fresh")
def test_a_torch_that_has_its_fields_elsewhere_shuts_it(monkeypatch):
    monkeypatch.setattr(fields, "_word", lambda tensor, place: 0)
    assert_shut("a TensorImpl does not")


@pytest.mark.usefixtures("fresh")
def test_a_torch_without_its_c_interface_shuts_it(monkeypatch):
    monkeypatch.setattr(fields, "GRADIENT", "no_such_function")
    assert_shut("torch's C interface is not to be had")


@pytest.mark.usefixtures("fresh")
def test_a_python_without_its_lock_shuts_it(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert_shut("no lock")


@pytest.mark.usefixtures("fresh")
def test_a_misspelt_switch_is_an_error(monkeypatch):
    monkeypatch.setenv("IPEX_PRIVATE_MEMORY", "no")
    with pytest.raises(OptionError, match="IPEX_PRIVATE_MEMORY to be 0 or 1; got 'no'"):
        switch.why_not()


COMPILED = """
import copy
import torch
from torch import nn
import ipex_inductor
from ipex_inductor.optim import fuse_step
from ipex_inductor.passes.weights import weight_access, weight_reader

model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8)), torch.randn(5, 64)
options = {"drop_plain_weights": True, "rules": "-plain-products", "strict": True}
fn = torch.compile(model.eval(), backend="ipex", options=options)
writes = (
    lambda w: w.mul_(2),  # counts a version
    lambda w: w.data.mul_(2),
    lambda w: w.numpy().__imul__(2),
)
with torch.no_grad():
    torch.testing.assert_close(fn(x), model(x))
    for write in writes:
        for layer in (model[0], model[2]):
            write(layer.weight)
            torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=1e-5)
assert ipex_inductor.derived_memory() > 0
assert isinstance(vars(torch.Tensor)["data"], property)  # the wrapper
assert isinstance(weight_reader.any_reader(), weight_reader.PythonReader)

ours = [nn.Parameter(torch.randn(n)) for n in (3, 40)]
theirs = copy.deepcopy(ours)
fused, plain = torch.optim.AdamW(ours, 0.01), torch.optim.AdamW(theirs, 0.01)
assert fuse_step(fused) is None
for _ in range(4):
    for p, q in zip(ours, theirs):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    before = [p._version for p in ours]
    fused.step()
    plain.step()
torch.testing.assert_close(ours, theirs)
assert [p._version for p in ours] == [version + 1 for version in before]  # as our step counts it
print("right")
"""


@pytest.mark.slow  # a process that compiles a model and a step
def test_a_process_without_private_memory_computes_right():
    env = {**os.environ, "IPEX_PRIVATE_MEMORY": "0"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.stdout == "right\n", run.stderr


# An address of an object or of a TensorImpl that is read, and CPython's own functions.
PRIVATE = re.compile(
    r"from_address\((id\(|.*_cdata)|_cdata *\+|__basicsize__|pythonapi\.PyDescr|_is_gil_enabled"
)


def test_nothing_else_reads_it():
    files = (file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    readers = {file for file in files if PRIVATE.search(file.read_text())}
    assert {file.parent for file in readers} == {DOOR}


def test_only_readers_of_tensors_go_through_it():
    files = {file for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    users = {f for f in files if "private_memory" in f.read_text() and f.parent != DOOR}
    folder = ROOT / "templates" / "tensor_reader"
    names = ("accesses_cpp.py", "freed.py", "look_cpp.py", "weights_cpp.py")
    assert users - {ROOT / "ipex_inductor" / "compat" / "__init__.py"} - {
        ROOT / "aot_cache" / "digest.py"
    } == {folder / name for name in names}

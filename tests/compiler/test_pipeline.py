"""The order of the pipeline's steps: the arrows of docs/architecture.md."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import ipex_inductor
from ipex_inductor.passes.weights import blocked

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
MOST = 15
ARROW = re.compile(
    r"^ +-> (?P<place>[\w/.]+)(: (?P<function>\w+))? {2,}(?P<text>.+)$", re.MULTILINE
)
PACKAGE = str(Path(ipex_inductor.__file__).parent)


class Arrow(NamedTuple):
    """One arrow of the document: a module, a folder (it ends in a slash) or a function."""

    place: str
    function: str | None
    text: str

    def matches(self, module: str, function: str) -> bool:
        """Return True if the arrow names this function, its module or a folder of that."""
        if self.place.endswith("/"):
            return module.startswith(self.place)
        return module == self.place and self.function in (None, function)

    def runs_on(self, device: str) -> bool:
        """Return True if the document restricts the arrow to no other device."""
        devices = {"CPUs": "cpu", "NVIDIA GPUs": "cuda"}
        return devices.get(self.text.partition(":")[0], device) == device


class Model(nn.Module):
    """A convolution with a batch norm and a ReLU, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.linear = nn.Linear(16 * 6 * 6, 32)

    def forward(self, x):
        """Return the features of an image of 8 x 8 pixels."""
        return self.linear(torch.relu(self.norm(self.conv(x))).flatten(1))


def arrows():
    return [
        Arrow(match["place"], match["function"], match["text"])
        for match in ARROW.finditer(DOCUMENT.read_text())
    ]


def is_importing(frame):
    """Return True if a module of the product is being imported, as class bodies are calls too."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def entered(call):
    """Return the product's functions in the order in which `call` first enters them.

    Each is a module's path below the package and a function's name. Only the calling thread is
    traced, as work in the background has no order.
    """
    order, seen = {}, set()

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or code in seen:
            return
        if code.co_filename.startswith(PACKAGE):
            if code.co_name == "<module>" or is_importing(frame.f_back):
                return
            module = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            order[module, code.co_name] = None
        seen.add(code)

    before = sys.gettrace()
    sys.settrace(note)  # unlike a profiler, it is not called for functions in C
    try:
        call()
    finally:
        sys.settrace(before)
    return list(order)


def compile_and_call(device):
    """Compile the model in inference, and call it twice."""
    model = Model().eval().to(device)
    x = torch.randn(4, 3, 8, 8, device=device)
    compiled = torch.compile(model, backend="ipex", options={"strict": True})
    with torch.no_grad():
        compiled(x)
        compiled(x)


def first_entries(expected, order):
    """Return for each arrow the number of the first function entered that it names."""
    numbers = {}
    for arrow in expected:
        met = (n for n, function in enumerate(order) if arrow.matches(*function))
        numbers[arrow] = next(met, None)
    return numbers


def check(device):
    expected = [arrow for arrow in arrows() if arrow.runs_on(device)]
    numbers = first_entries(expected, entered(lambda: compile_and_call(device)))
    assert not [f"{a.place} is never entered" for a, number in numbers.items() if number is None]
    assert sorted(expected, key=numbers.__getitem__) == expected


def test_arrows_name_what_there_is():
    assert 10 <= len(arrows()) <= MOST
    assert DOCUMENT.read_text().count("  -> ") == len(arrows())
    for place, function, _ in arrows():
        file = Path(PACKAGE, place)
        assert file.is_dir() if place.endswith("/") else file.is_file(), place
        assert function is None or f"def {function}(" in file.read_text(), (place, function)


def check_on_cpu():
    """Check a compilation for a CPU that has kernels of this package."""
    blocked.architecture = lambda: "x86-64:avx2"
    check("cpu")


@pytest.mark.usefixtures("instructions_known", "products_known")
def test_a_compilation_goes_by_the_arrows(tmp_path):
    """In a process of its own: what an earlier compilation left is not entered again."""
    program = f"import runpy; runpy.run_path({__file__!r})['check_on_cpu']()"
    folders = {"IPEX_HOME": tmp_path / "home", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "inductor"}
    env = {**os.environ, **{name: str(folder) for name, folder in folders.items()}}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
def test_a_compilation_on_a_gpu_goes_by_the_arrows():
    check("cuda")

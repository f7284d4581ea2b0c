"""What tests of steps on a GPU ask for: what was launched, that nobody waits; who times alone."""

import fcntl
import tempfile
from pathlib import Path

import pytest
import torch

from ipex_inductor.compat.private_memory import WORD
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.tensor_reader.look_cpp import Reader
from support.optim.gpu_step_inputs import TURN


@pytest.fixture(autouse=True)
def _alone(request):
    """A test that is marked so waits until no other one of a GPU runs, and they for it."""
    exclusive = request.node.get_closest_marker("alone") is not None
    with Path(tempfile.gettempdir(), "ipex_gpu_tests.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


@pytest.fixture
def launches(monkeypatch):
    """The launches of each kernel, in order."""
    made, launch, ask = [], cuda.Kernel.__call__, Reader.check_and_count

    def counted(self, *args):
        made.append(self)
        launch(self, *args)

    def again(self, *args):
        told = ask(self, *args)
        if told == []:  # all turns were taken
            made.extend([TURN] * (len(args[-2]) // WORD))
        return told

    monkeypatch.setattr(cuda.Kernel, "__call__", counted)
    monkeypatch.setattr(Reader, "check_and_count", again)
    return made


@pytest.fixture
def quiet():
    """Nobody waits for the GPU in here, once it was left."""

    def silence(on):
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield silence
    silence(False)

"""What tests of steps on a GPU ask for: what was launched, and that nobody waits."""

import pytest
import torch
from gpu_steps import TURN

from ipex_inductor.templates import cuda
from ipex_inductor.templates.look_cpp import WORD, Reader


@pytest.fixture
def launches(monkeypatch):
    """The launches of each kernel, in order."""
    made, launch, ask = [], cuda.Kernel.__call__, Reader.again

    def counted(self, *args):
        made.append(self)
        launch(self, *args)

    def again(self, *args):
        told = ask(self, *args)
        if told == []:  # all turns were taken
            made.extend([TURN] * (len(args[-2]) // WORD))
        return told

    monkeypatch.setattr(cuda.Kernel, "__call__", counted)
    monkeypatch.setattr(Reader, "again", again)
    return made


@pytest.fixture
def quiet():
    """Nobody waits for the GPU in here, once it was left."""

    def silence(on):
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield silence
    silence(False)

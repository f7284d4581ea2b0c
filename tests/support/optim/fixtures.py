"""Fixtures for tests of optimizer steps; conftest.py files import them."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Use one thread while a module runs: the tensors are small, and threads would wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _on_device(request):
    """Repeat the steps on a GPU: `pytest tests/optim tests/lowerings/optimizer --device cuda`."""
    device = request.config.getoption("device")
    if device == "cpu":
        yield
        return
    if (host := request.node.get_closest_marker("host")) is not None:
        pytest.skip(host.args[0])
    with torch.device(device):
        yield


@pytest.fixture(params=["C++", "Python"])
def way(request, monkeypatch):
    """How a step looks at tensors."""
    from ipex_inductor.optim import state_fingerprint
    from ipex_inductor.templates.tensor_reader import look_cpp

    if request.param == "Python":
        monkeypatch.setattr(state_fingerprint, "_reader", lambda: None)
    else:
        assert isinstance(look_cpp.reader(), look_cpp.Reader), look_cpp.reader()
    return request.param


@pytest.fixture
def launches(monkeypatch):
    """How many kernels of compiled steps were called."""
    from ipex_inductor.lowerings.optimizer import step as launching

    calls = []

    def watched(known):
        def ready(kernel, *args):
            calls.append(kernel)
            return known(kernel, *args)

        return ready

    for kind in {launching._Kernel, launching.CudaKernel}:
        monkeypatch.setattr(kind, "ready", watched(kind.ready))
    return calls

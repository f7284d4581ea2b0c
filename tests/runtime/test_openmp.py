"""OpenMP's threads: how many this thread's calls get, and nobody else's."""

import threading
from types import SimpleNamespace

import pytest
import torch

from ipex_inductor.passes.weights import program
from ipex_inductor.runtime import openmp

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _two():
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


def test_one_thread_inside_and_all_of_them_after_whatever_is_raised():
    def fail():
        assert torch.get_num_threads() == 1
        raise KeyError

    with pytest.raises(KeyError), openmp.one_thread():
        fail()
    assert torch.get_num_threads() == 2


def test_other_threads_keep_theirs_even_new_ones():
    seen = []
    with openmp.one_thread():
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert seen == [2]


def test_without_openmp_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(openmp, "_set_number", lambda: None)
    with openmp.one_thread():
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["_reorder_convolution_weight", "_reorder_linear_weight"])
def test_small_weights_are_packed_by_one_thread_and_large_ones_by_all(monkeypatch, name):
    seen = []
    op = SimpleNamespace(default=lambda weight: seen.append(torch.get_num_threads()))
    monkeypatch.setattr(torch.ops.mkldnn, name, op)
    program._function.cache_clear()
    try:
        steps = (program.Step(f"mkldnn::{name}", (program.Ref(0),), ()),)
        packs = program.Program((0,), ("a weight",), steps, ())
        for size in (program.PACKED_ALONE, program.PACKED_ALONE + 1):
            packs.run([torch.empty(size)])
    finally:
        program._function.cache_clear()
    assert seen == [1, 2]

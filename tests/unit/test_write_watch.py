"""The kernel notes writes to weights: one element of many megabytes is found within 64 calls."""

import ctypes
import mmap
import os

import pytest
import torch

from ipex_inductor import decisions
from ipex_inductor.passes import derived, program, weight_results
from ipex_inductor.passes.weight_contents import SWEEP
from ipex_inductor.templates import write_watch
from ipex_inductor.templates.write_watch import LEAST, PAGE, is_written

pytestmark = pytest.mark.skipif(
    bool(write_watch.why_not()), reason=f"the kernel notes no writes: {write_watch.why_not()}"
)
COUNT, ELEMENTS = 12, 1 << 18  # 12 MiB: compared in turn alone, they take 96 calls
CALLS = 64


@pytest.fixture
def memory():
    """Anonymous memory of 16 pages, its address."""
    mapped = mmap.mmap(-1, 16 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def watch(address, size):
    kernel = write_watch.kernel()
    assert kernel is not None
    return kernel.watch(address, size)


def in_a_child(function):
    """Return what `function` returns in a forked process."""
    child = os.fork()
    if not child:
        code = 99
        try:
            code = int(function())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_byte_that_is_written_shows_until_pages_are_protected_again(memory):
    mapped, address = memory
    pages = watch(address, len(mapped))
    assert not is_written(pages)
    assert mapped[5 * PAGE] == 0
    assert not is_written(pages), "reading is no write"
    mapped[5 * PAGE] = 1
    assert is_written(pages)
    assert is_written(pages), "asking changes nothing"
    pages.protect()
    assert not is_written(pages)


def test_only_whole_pages_are_watched(memory):
    mapped, address = memory
    assert watch(address + 1, LEAST) is None
    pages = watch(address + 1, 10 * PAGE)
    assert (pages.begin, pages.size) == (address + PAGE, 9 * PAGE)
    mapped[PAGE - 1] = mapped[10 * PAGE] = 1
    assert not is_written(pages)
    mapped[10 * PAGE - 1] = 1
    assert is_written(pages)


def test_the_same_pages_are_watched_once_until_nobody_needs_them(memory):
    mapped, address = memory
    first, second = (watch(address, len(mapped)) for _ in range(2))
    assert first is second
    del first
    assert not is_written(second)
    kernel, begin, size = second.kernel, second.begin, second.size
    del second
    with pytest.raises(write_watch.UnwatchableError):  # no longer registered
        kernel.ioctl(write_watch.UFFDIO_WRITEPROTECT, begin, size, write_watch.WRITE_PROTECT)


def test_memory_that_is_not_mapped_is_refused():
    with pytest.raises(write_watch.UnwatchableError):
        watch(PAGE * 16, LEAST)


def test_a_forked_process_leaves_its_parents_pages_watched(memory):
    mapped, address = memory
    kept = [watch(address, len(mapped))]

    def child():
        kernel, pages = write_watch.kernel(), kept.pop()
        own = kernel is not pages.kernel and not pages.kernel.is_of_this_process()
        del pages  # ends nothing in the parent
        watched = kernel.watch(address, len(mapped))
        mapped[PAGE] = 1
        return own and is_written(watched)

    assert in_a_child(child) == 1
    assert not is_written(kept[0])
    mapped[3] = 1
    assert is_written(kept[0])


def doubles():
    step = program.Step("aten::add.Tensor", (program.Ref(0), program.Ref(0)), ())
    programs = [program.Program((i,), ("",), (step,), (program.Ref(1),)) for i in range(COUNT)]
    return derived.DerivedWeights(programs, captured=False)


def poke(weight, element=ELEMENTS // 2 + 3):
    """Write one element by a raw pointer."""
    ctypes.memset(weight.data_ptr() + 4 * element, 0x42, 4)


def is_right(results, weights):
    return all(map(torch.equal, results, [w + w for w in weights]))


def contents(graph):
    (snapshot,) = graph._snapshots.values()
    return snapshot.current.contents


def is_watched(graph):
    return all(hashes.pages for hashes in contents(graph).weights)


@pytest.fixture
def warned(monkeypatch):
    texts = []
    monkeypatch.setattr(decisions, "warn_once", texts.append)
    return texts


@pytest.fixture
def subject():
    graph, weights = doubles(), [torch.randn(ELEMENTS) for _ in range(COUNT)]
    graph.of(weights)
    return graph, weights


def calls_until_right(graph, weights, most=200):
    """Return how many calls returned what a write outdated; None: all."""
    (snapshot,) = graph._snapshots.values()
    first = snapshot.current.values
    for number in range(most):
        results = graph.of(weights)
        if results is not first:
            assert is_right(results, weights)
            return number
    return None


def test_new_weights_are_watched_and_a_write_to_any_is_found(subject, warned):
    graph, weights = subject
    assert is_watched(graph)
    for number, weight in enumerate(weights):
        poke(weight)
        assert calls_until_right(graph, weights) < CALLS
        assert len(warned) == number + 1


def test_weights_that_changed_soon_are_watched_once_they_stay(subject, warned):
    graph, weights = subject
    torch._foreach_add_(weights, 1)
    graph.of(weights)
    assert not is_watched(graph), "each step of an optimizer would pay for faults"
    poke(weights[1], ELEMENTS - 70_000)
    assert calls_until_right(graph, weights) < CALLS
    assert warned
    torch._foreach_add_(weights, 1)
    for _ in range(SWEEP + 1):
        graph.of(weights)
    assert is_watched(graph)
    poke(weights[-1])
    assert calls_until_right(graph, weights) < CALLS


def test_the_same_values_written_again_are_no_write(subject, warned):
    graph, weights = subject
    first = graph.of(weights)
    for weight in weights:
        copy = weight.clone()
        ctypes.memmove(weight.data_ptr(), copy.data_ptr(), weight.nbytes)
    for _ in range(3 * SWEEP):
        assert graph.of(weights) is first
    assert not warned
    assert not any(is_written(hashes.pages) for hashes in contents(graph).weights)


def test_all_graphs_of_a_weight_learn_of_a_write(subject, warned):
    graph, weights = subject
    other = doubles()
    assert other.of(weights) == graph.of(weights), "shared"
    poke(weights[3])
    assert calls_until_right(graph, weights) < CALLS
    assert is_right(other.of(weights), weights)


def test_a_forked_process_compares_in_turn(subject, warned):
    """Its writes are its own, and the kernel's notes are its parent's."""
    graph, weights = subject
    torch.set_num_threads(1)  # OpenMP's threads are not forked

    def child():
        poke(weights[3])
        return calls_until_right(graph, weights) is not None

    assert in_a_child(child) == 1
    assert is_right(graph.of(weights), weights)
    assert not warned
    poke(weights[4])
    assert calls_until_right(graph, weights) < CALLS


def test_where_the_kernel_does_not_help_contents_are_compared_in_turn(monkeypatch, warned):
    monkeypatch.setattr(write_watch, "why_not", lambda: "as in a trial")
    graph, weights = doubles(), [torch.randn(ELEMENTS) for _ in range(COUNT)]
    graph.of(weights)
    assert not is_watched(graph)
    poke(weights[3])
    assert calls_until_right(graph, weights) < 2 * CALLS


def test_memory_of_another_mapping_is_not_watched_but_compared(monkeypatch, warned):
    """As where a process has as many mappings as it may."""

    def refuse(kernel, address, size):
        raise write_watch.UnwatchableError(12, "Cannot allocate memory")

    monkeypatch.setattr(write_watch.Kernel, "watch", refuse)
    graph, weights = doubles(), [torch.randn(ELEMENTS) for _ in range(COUNT)]
    assert is_right(graph.of(weights), weights)
    assert not is_watched(graph)


def test_without_asking_the_kernel_the_write_is_missed(subject, monkeypatch):
    """What finds it is the kernel's note."""
    graph, weights = subject
    graph_contents = contents(graph)
    graph_contents.numbers[4] = 0  # asks
    poke(weights[3])
    assert calls_until_right(graph, weights, CALLS) is None
    assert weight_results.write_watch.kernel() is not None

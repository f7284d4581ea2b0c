"""The kernel notes writes to weights: one element of many megabytes is found within 64 calls."""

import ctypes
import mmap
import os

import pytest
import torch
from torch import nn

from ipex_inductor.passes.weights import derived, program, weight_contents, weight_results
from ipex_inductor.passes.weights.weight_contents import SWEEP
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.tensor_reader import write_watch
from ipex_inductor.templates.tensor_reader.weights_triton import DeviceHashes
from ipex_inductor.templates.tensor_reader.write_watch import LEAST, PAGE, is_written

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(
        bool(write_watch.why_not()), reason=f"the kernel notes no writes: {write_watch.why_not()}"
    ),
]
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


def test_pages_that_overlap_others_show_what_those_have_not_yet_been_asked_for(memory):
    mapped, address = memory
    first = watch(address, 8 * PAGE)
    mapped[5 * PAGE] = 1
    second = watch(address + 4 * PAGE, 8 * PAGE)
    assert is_written(first)
    assert is_written(second), "some of its pages were not watched before"
    inside = watch(address, 5 * PAGE)
    assert not is_written(inside), "what was written is behind it"
    second.protect()
    del first, inside
    assert is_written(second), "no longer watched whole, so nothing is known of it"
    second.protect()
    assert not is_written(second)
    mapped[5 * PAGE] = 2
    assert is_written(second)


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


def test_a_forked_process_that_is_refused_the_service_goes_without_it(memory, monkeypatch):
    """As by its limit of open files, or without /proc; no file stays open."""
    assert write_watch.kernel() is not None

    def child():
        before, real = len(os.listdir("/proc/self/fd")), os.open

        def refuse(path, *args, **kwargs):
            if path == "/proc/self/pagemap":
                raise FileNotFoundError(2, "No such file or directory", path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
        refused = write_watch.kernel() is None
        return refused and len(os.listdir("/proc/self/fd")) == before

    assert in_a_child(child) == 1


def doubles(count=COUNT):
    step = program.Step("aten::add.Tensor", (program.Ref(0), program.Ref(0)), ())
    programs = [program.Program((i,), ("",), (step,), (program.Ref(1),)) for i in range(count)]
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


def test_a_large_weight_is_asked_about_in_pieces(warned):
    step = program.Step("aten::add.Tensor", (program.Ref(0), program.Ref(0)), ())
    graph = derived.DerivedWeights(
        [program.Program((0,), ("",), (step,), (program.Ref(1),))], captured=False
    )
    weights = [torch.randn(6 << 20)]
    graph.of(weights)
    assert (len(contents(graph).weights), contents(graph).asks) == (1, 1)
    for element in (5, (1 << 20) + 3, (6 << 20) - 2000):
        poke(weights[0], element)
        assert calls_until_right(graph, weights) < CALLS


def test_an_empty_weight_is_never_in_doubt():
    graph = doubles()
    weights = [torch.empty(0), *(torch.randn(ELEMENTS) for _ in range(COUNT - 1))]
    first = graph.of(weights)
    (snapshot,) = graph._snapshots.values()
    assert all(part.is_current() for part in snapshot.parts)
    assert graph.of(weights) is first


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


def test_weights_that_share_pages_of_one_storage_are_all_found_written(warned):
    """A second graph that begins to watch a storage hides no write from the first."""
    base = torch.randn(3 << 21)
    part, whole = ([nn.Parameter(base[:n], requires_grad=False)] for n in (1 << 21, 3 << 20))
    graph = doubles(1)
    graph.of(part)
    assert is_watched(graph)
    poke(part[0])
    other = doubles(1)
    other.of(whole)
    assert calls_until_right(graph, part) < CALLS
    assert warned


def test_a_mapped_file_that_another_process_writes_is_compared_in_turn(tmp_path, warned):
    """A private mapping shows it as well, and the kernel notes nothing."""
    file, count = tmp_path / "weights", 1 << 21
    file.write_bytes(bytes(4 * count))
    storage = torch.UntypedStorage.from_file(str(file), False, 4 * count)
    weights = [torch.empty(0).set_(storage)]
    del storage
    graph = doubles(1)
    graph.of(weights)
    assert is_watched(graph)
    with file.open("r+b") as opened:
        opened.seek(4 * count - 8)
        opened.write(b"BBBB")
    assert not is_written(contents(graph).weights[0].pages)
    assert calls_until_right(graph, weights) <= CALLS
    assert warned


def test_weights_that_stay_are_watched_while_an_access_is_looked_at(subject):
    graph, weights = subject
    alias = weights[0].data
    torch._foreach_add_(weights, 1)
    for _ in range(SWEEP + 2):
        graph.of(weights)
    assert is_watched(graph)
    assert alias is not weights[0]


def test_a_write_found_as_weights_begin_to_be_watched_shows_in_that_call(subject, warned):
    graph, weights = subject
    torch._foreach_add_(weights, 1)
    graph.of(weights)
    (snapshot,) = graph._snapshots.values()
    while snapshot.calls < SWEEP - 1:
        graph.of(weights)
    poke(weights[-1], ELEMENTS - 1)  # behind what was compared in turn
    assert is_right(graph.of(weights), weights)
    assert warned


def test_weights_that_are_computed_from_again_have_no_old_notes(subject):
    graph, weights = subject
    for _ in range(SWEEP):
        graph.of(weights)
    torch._foreach_add_(weights, 1)
    graph.of(weights)
    assert is_watched(graph)
    assert not any(is_written(hashes.pages) for hashes in contents(graph).weights)


def test_many_weights_written_with_what_they_were_hide_no_other(warned):
    graph, weights = doubles(10 * COUNT), [torch.randn(20_000) for _ in range(10 * COUNT)]
    graph.of(weights)
    for weight in weights:
        copy = weight.clone()
        ctypes.memmove(weight.data_ptr(), copy.data_ptr(), weight.nbytes)
    poke(weights[-1], 10_000)
    assert calls_until_right(graph, weights) < CALLS


def test_without_the_kernel_weights_are_not_compared_whole_in_vain(monkeypatch):
    monkeypatch.setattr(write_watch, "why_not", lambda: "as in a trial")
    graph, weights = doubles(), [torch.randn(ELEMENTS) for _ in range(COUNT)]
    graph.of(weights)
    before, compared = contents(graph), []
    monkeypatch.setattr(weight_results.Part, "find_outdated", compared.append)
    for _ in range(2 * SWEEP + 2):
        graph.of(weights)
    assert not compared
    assert contents(graph) is before, "comparing goes on where it is"


def test_a_gpu_without_the_kernel_to_compare_contents_says_so_once(monkeypatch, warned):
    """The call that meets it goes on, without comparing."""
    made = []

    def fail(hashes, sweep):
        made.append(sweep)
        raise NotBuiltError("as in a trial")

    monkeypatch.setattr(weight_contents, "is_captured", lambda device: False)
    monkeypatch.setattr(weight_contents, "Comparer", fail)
    on_device = DeviceHashes(0, 4, torch.zeros(1, dtype=torch.int32))
    on_devices = weight_contents.gather_on_devices([None, on_device])
    assert [on_devices.launch() for _ in range(3)] == [[]] * 3
    assert made == [SWEEP]
    assert ["as in a trial" in text for text in warned] == [True]


def test_nothing_is_allocated_while_a_program_captures(monkeypatch):
    monkeypatch.setattr(weight_contents, "is_captured", lambda device: True)
    on_device = DeviceHashes(0, 4, torch.zeros(1, dtype=torch.int32))
    on_devices = weight_contents.gather_on_devices([on_device])
    assert on_devices.launch() == []
    assert not on_devices.comparers


def test_ranges_beyond_the_most_are_compared_in_turn(monkeypatch, caplog):
    monkeypatch.setattr(write_watch, "MOST_RANGES", 5 + len(write_watch.kernel()._watched))
    caplog.set_level("INFO", "ipex_inductor")
    graph, weights = doubles(), [torch.randn(ELEMENTS) for _ in range(COUNT)]
    assert is_right(graph.of(weights), weights)
    assert sum(hashes.pages is not None for hashes in contents(graph).weights) == 5
    assert "the most there may be" in caplog.text

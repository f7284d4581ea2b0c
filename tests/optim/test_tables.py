"""What is sent to a GPU and what lies there, with a GPU that is played by the host's memory."""

import ctypes
from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ipex_inductor.errors import DeviceError
from ipex_inductor.optim import plan
from ipex_inductor.templates.optimizer import step_cuda
from ipex_inductor.templates.tensor_reader import step_counters
from ipex_inductor.templates.tensor_reader.step_counters import Cells


class Event:
    """One that the test lets happen."""

    made: list

    def __init__(self):
        self.done, self.streams = True, []
        Event.made.append(self)

    def record(self, stream):
        self.done = False
        self.streams.append(stream.cuda_stream)

    def query(self):
        return self.done


@pytest.fixture
def gpu(monkeypatch):
    """Its current stream, and whether that is captured."""
    here = SimpleNamespace(cuda_stream=7, captured=False)
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here.captured)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _=None: SimpleNamespace(cuda_stream=here.cuda_stream)
    )
    pinned = lambda size: torch.empty(size, dtype=torch.uint8, device="cpu")  # noqa: E731
    monkeypatch.setattr(step_cuda, "_allocate_pinned", pinned)
    monkeypatch.setattr(step_cuda, "On", lambda device: nullcontext(here.cuda_stream))
    return here


def there(address, count):
    return [*(ctypes.c_int64 * count).from_address(address)]


def test_a_table_goes_over_when_it_changed_and_stays_where_it_is(gpu):
    sent = step_cuda.Sent(torch.device("cpu"))
    first = sent.address(array("q", [1, 2, 3]), 7)
    assert there(first, 3) == [1, 2, 3]
    assert sent.address(array("q", [1, 2, 3]), 7) == first
    assert [len(event.streams) for event in Event.made] == [1]
    assert sent.address(array("q", [4, 2, 3]), 7) == first
    assert there(first, 3) == [4, 2, 3]
    table = array("q", [5, 6])
    assert there(sent.address(table, 7), 2) == [5, 6]
    table[0] = 8  # in place, as steps' tables are
    assert there(sent.address(table, 7), 2) == [8, 6]


def test_no_stage_is_written_while_a_copy_reads_it(gpu):
    """The host may be any number of steps ahead."""
    sent = step_cuda.Sent(torch.device("cpu"))
    for number in range(4):
        sent.address(array("q", [number]), 7)
    stages = [there(stage.memory.data_ptr(), 1) for stage in sent._stages]
    assert stages == [[0], [1], [2], [3]]
    assert len(Event.made) == 4
    Event.made[1].done = True  # not the first of them
    sent.address(array("q", [4]), 7)
    assert len(Event.made) == 5
    Event.made[0].done = True
    sent.address(array("q", [5]), 7)
    assert len(Event.made) == 5
    stages = [there(stage.memory.data_ptr(), 1) for stage in sent._stages]
    assert stages == [[1], [2], [3], [4], [5]]


def test_each_stream_has_its_own_table(gpu):
    """What another still reads is not written."""
    sent, values = step_cuda.Sent(torch.device("cpu")), array("q", [1, 2])
    one = sent.address(values, 7)
    held = sent._there
    gpu.cuda_stream = 9
    other = sent.address(values, 9)
    assert other != one
    assert there(held.data_ptr(), 2) == there(other, 2) == [1, 2]
    assert Event.made[-1].streams[-1] == 9


def test_a_graph_has_memory_of_its_own(gpu):
    sent = step_cuda.Sent(torch.device("cpu"))
    gpu.captured = True
    with pytest.raises(DeviceError, match="ran before"):
        sent.address(array("q", [1, 2]), 7)
    gpu.captured = False
    outside = sent.address(array("q", [1, 2]), 7)
    gpu.captured = True
    inside = sent.address(array("q", [3, 4]), 7)
    assert there(inside, 2) == [3, 4]
    assert there(outside, 2) == [1, 2]
    with pytest.raises(DeviceError, match="between two captures"):
        sent.address(array("q", [3, 4]), 7)


def test_the_allocator_hears_of_other_streams_once(gpu, monkeypatch):
    told = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: told.append(s.cuda_stream))
    room = step_cuda.Room(torch.zeros(3, device="cpu"))
    for stream in (7, 9, 9, 7, 11):
        gpu.cuda_stream = stream
        assert room.address(stream) == room._held.data_ptr()
    assert told == [9, 11]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("way", ["C++", "Python"])
def test_steps_are_read_and_written_where_they_lie(dtype, way, monkeypatch):
    if way == "Python":
        monkeypatch.setattr(step_counters, "reader", lambda: "")
    held = [torch.tensor(3.0, dtype=getattr(torch, dtype), device="cpu") for _ in range(5)]
    made = Cells(dtype, 3.0)
    assert made.are_unchanged()  # of none
    assert made.next_steps() == 0
    for tensor in held:
        made.add(tensor.data_ptr())
    assert len(made) == 5
    assert made.are_unchanged()
    held[4] += 1
    assert not made.are_unchanged()
    made.write(7.0)
    assert [float(tensor) for tensor in held] == [7.0] * 5
    assert made.are_unchanged()
    assert (made.steps, made.next_steps()) == (7.0, 8.0)


def test_addresses_of_gradients_go_to_their_rows():
    """Of tables of other widths, in turn, and of one row."""
    wide, narrow, one = array("q", [0] * 8), array("q", [0] * 6), array("q", [9] * 5)
    made = plan.Plan()
    made.grads = [(wide, 1), (narrow, 0), (one, 2), (wide, 5), (narrow, 2), (narrow, 4)]
    made.move(array("q", range(1, 7)))
    assert [*wide] == [0, 1, 0, 0, 0, 4, 0, 0]
    assert [*narrow] == [2, 0, 5, 0, 6, 0]
    assert [*one] == [9, 9, 3, 9, 9]

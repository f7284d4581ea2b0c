"""A timer that lets calls wait on the device, by a device that tests move."""

import pytest

from ipex_inductor.autotune.timers import MOST_CYCLES, QueuedClock

pytestmark = pytest.mark.unit

RATE = 1000.0  # cycles of a microsecond
SUBMIT, TAKES = 30.0, 5.0  # microseconds of the host and of the device for a call


class Device:
    """A host that submits calls and a device that runs them, with a clock each."""

    def __init__(self):
        self.host = self.busy_until = 0.0
        self.slept, self.waited, self.submit = [], 0, SUBMIT

    def run(self, inputs):
        self.host += self.submit
        self.busy_until = max(self.host, self.busy_until) + TAKES

    def synchronize(self):
        self.host = max(self.host, self.busy_until)
        self.waited += 1

    def _sleep(self, cycles):
        self.slept.append(cycles)
        self.busy_until = max(self.host, self.busy_until) + cycles / RATE

    def Event(self, enable_timing):
        device = self

        class Event:
            def record(self):
                self.at = max(device.host, device.busy_until)

            def query(self):
                return device.host >= self.at

            def synchronize(self):
                device.host = max(device.host, self.at)

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

        return Event()


def test_the_hosts_time_is_excluded():
    device = Device()
    round = QueuedClock(device).prepare(device.run, [[1], [2], [3]])
    assert round() == pytest.approx(TAKES)
    assert round() == pytest.approx(TAKES)
    assert device.waited >= 1, "every set of inputs was run once before"


def test_calls_are_held_up_longer_if_the_device_was_early():
    device = Device()
    round = QueuedClock(device).prepare(device.run, [[n] for n in range(40)])
    assert round() == pytest.approx(TAKES)
    assert device.slept[-1] / RATE > 40 * SUBMIT
    assert device.slept == sorted(device.slept)


def test_what_waits_for_the_device_itself_cannot_be_timed():
    """It would be early however long it is held up, and its time would contain the host's."""
    device = Device()

    def run(inputs):
        device.run(inputs)
        device.synchronize()

    clock = QueuedClock(device)
    with pytest.raises(RuntimeError, match="before the host had submitted all of them"):
        clock.prepare(run, [[1]])
    assert max(device.slept) <= MOST_CYCLES
    assert clock.prepare(device.run, [[1]])() == pytest.approx(TAKES)
    assert device.slept[-1] < MOST_CYCLES / 10, "the next call is held up no longer"


def test_a_host_that_is_too_slow_gives_no_time():
    """More launches would take longer then, though the device runs them as fast."""
    device = Device()
    round = QueuedClock(device).prepare(device.run, [[1]])
    device.submit = 2 * MOST_CYCLES / RATE
    with pytest.raises(RuntimeError, match="the host is busy"):
        round()

"""A timer that lets calls wait on the device, by a device that tests move."""

import pytest

from ipex_inductor.autotune.timers import QueuedClock

pytestmark = pytest.mark.unit

RATE = 1000.0  # cycles of a microsecond
SUBMIT, TAKES = 30.0, 5.0  # microseconds of the host and of the device for a call


class Device:
    """A host that submits calls and a device that runs them, with a clock each."""

    def __init__(self):
        self.host = self.busy_until = 0.0
        self.slept, self.waited = [], 0

    def run(self, inputs):
        self.host += SUBMIT
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


def test_what_waits_for_the_device_itself_is_timed_as_it_is():
    """It would be early however long it is held up."""
    device = Device()

    def run(inputs):
        device.run(inputs)
        device.synchronize()

    round = QueuedClock(device).prepare(run, [[1]])
    assert round() >= TAKES

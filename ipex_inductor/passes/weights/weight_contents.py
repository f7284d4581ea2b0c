"""Choose how the contents of a graph's weights are compared at each call.

A sample of each weight shows a write to whole tensors at once. A write to a few elements shows
within `SWEEP` calls: contents are compared in turn, or the kernel is queried in turn for pages that
were written, where it notes writes (`templates/tensor_reader/write_watch.py`). Without the kernel's
help, contents of more than 7 MiB take longer.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ipex_inductor.errors import DeviceError
from ipex_inductor.passes.weights.weight_doubts import FULL
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.tensor_reader.weights_cpp import ASK, BLOCK, Contents, Hashes
from ipex_inductor.templates.tensor_reader.weights_triton import Comparer, DeviceHashes, is_captured

AnyHashes = Hashes | DeviceHashes | None
Launched = list[tuple[list[int], Comparer, int]]  # numbers of weights, their comparer, ticket
SWEEP = 56  # calls within which all contents are compared
LEAST, MOST = 1 << 12, 1 << 17  # bytes compared in turn at a call: 0.3 and 8 microseconds
SAMPLE = 512  # bytes whose comparison in turn takes as long as the sample of one weight


def are_worth_watching(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether comparing the contents of weights in turn takes over `SWEEP` calls."""
    on_cpu = [weight.nbytes for weight in weights if weight.device.type == "cpu"]
    return sum(on_cpu) > SWEEP * _most_in_turn(len(on_cpu))


def is_compared_slowly(contents: Contents | None) -> bool:
    """Return whether comparing unwatched contents in turn takes more than `SWEEP` calls."""
    if contents is None or contents.total <= contents.limits[0]:
        return False
    return contents.unwatched_bytes > SWEEP * _most_in_turn(len(contents.weights))


class DeviceContents:
    """The contents of a graph's weights that lie on GPUs."""

    def __init__(self, hashes: Sequence[AnyHashes]) -> None:
        self._by_device: dict[torch.device, dict[int, DeviceHashes]] = {}
        for number, content in enumerate(hashes):
            if isinstance(content, DeviceHashes):
                self._by_device.setdefault(content.words.device, {})[number] = content
        self.comparers: list[tuple[list[int], Comparer]] = []

    def launch(self) -> Launched:
        """Begin to compare samples and some blocks in turn, in the current stream of each GPU."""
        launched: Launched = []
        with self._given_up_if_refused():
            if not self.comparers:  # memory allocated during a capture would belong to it
                if any(map(is_captured, self._by_device)):
                    return launched
                contents = self._by_device.values()
                self.comparers = [
                    ([*hashes], Comparer([*hashes.values()], SWEEP)) for hashes in contents
                ]
            for numbers, comparer in self.comparers:
                ticket = comparer.launch()
                if ticket is not None:  # else a program captures a graph of its own
                    launched.append((numbers, comparer, ticket))
        return launched

    def is_answered(self) -> bool:
        """Return whether the last comparison has ended on each GPU, without a difference."""
        return all(comparer.is_answered() for _, comparer in self.comparers)

    def forget(self) -> None:
        """Clear recorded differences: the weights are unchanged."""
        for _, comparer in self.comparers:
            comparer.forget()

    @contextlib.contextmanager
    def _given_up_if_refused(self) -> Iterator[None]:
        try:
            yield
        except (NotBuiltError, DeviceError) as error:
            decisions.warn_once(f"contents of weights on GPUs are no longer compared: {error}")
            self._by_device, self.comparers = {}, []


def find_differing(launched: Launched) -> Iterator[int]:
    """Wait for comparisons of `DeviceContents.launch`; yield one differing weight for each GPU."""
    for numbers, comparer, ticket in launched:
        place = comparer.find_differing(ticket)
        if place is not None:
            yield numbers[place]


def gather_on_devices(hashes: Sequence[AnyHashes]) -> DeviceContents | None:
    """Return the contents that are compared on GPUs at each call; None if there are none."""
    is_any = any(isinstance(content, DeviceHashes) for content in hashes)
    return DeviceContents(hashes) if is_any else None


def gather_contents(
    contents: Sequence[AnyHashes], weights: Sequence[torch.Tensor]
) -> Contents | None:
    """Return the contents that are compared on the CPU at each call; None if there are none."""
    hashes = [content if isinstance(content, Hashes) else None for content in contents]
    compared = [content for content in hashes if content]
    if not compared:
        return None
    total = sum(content.blocks for content in compared) * BLOCK
    if total <= (FULL if any(w.is_inference() for w in weights) else MOST // 4):
        return Contents(hashes, (total, total))
    watched = [content for content in compared if content.pages]
    passed_over = sum(c.pages.size for c in watched if c.pages and not c.in_turn)
    most = _most_in_turn(len(compared))
    limits = [min(max(size // SWEEP, LEAST), most) for size in (total - passed_over, total)]
    pieces = sum(-(-c.pages.size // ASK) for c in watched if c.pages)
    return Contents(hashes, (limits[0], limits[1]), -(-pieces // SWEEP))


def _most_in_turn(count: int) -> int:
    return max(MOST - SAMPLE * count, MOST // 4)

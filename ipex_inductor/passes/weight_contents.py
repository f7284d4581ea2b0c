"""Choose how the contents of a graph's weights are compared at each call.

A sample of each weight shows a write to whole tensors at once. A write to a few elements shows
within `SWEEP` calls: contents are compared in turn, or the kernel is asked in turn for pages that
were written, where it notes writes (`templates/write_watch.py`). Without the kernel's help,
contents of more than 7 MiB take longer.
"""

from collections.abc import Sequence

import torch

from ipex_inductor.passes.weight_doubts import FULL
from ipex_inductor.templates.weights_cpp import BLOCK, Contents, Hashes

SWEEP = 56  # calls
LEAST, MOST = 1 << 12, 1 << 17  # bytes compared in turn at a call: 0.3 and 8 microseconds
SAMPLE = 256  # of these bytes, that the sample of a weight takes the time of


def are_worth_watching(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether comparing their contents in turn takes more than `SWEEP` calls."""
    on_cpu = [weight.nbytes for weight in weights if weight.device.type == "cpu"]
    return sum(on_cpu) > SWEEP * _most_in_turn(len(on_cpu))


def is_compared_slowly(contents: Contents | None) -> bool:
    """Return whether comparing what is not watched takes more than `SWEEP` calls."""
    if contents is None or contents.total <= contents.limits[0]:
        return False
    return contents.unwatched > SWEEP * _most_in_turn(len(contents.weights))


def gather_contents(
    hashes: Sequence[Hashes | None], weights: Sequence[torch.Tensor]
) -> Contents | None:
    """Return the contents that are compared at each call; None if there are none."""
    known = [content for content in hashes if content]
    if not known:
        return None
    total = sum(content.blocks for content in known) * BLOCK
    if total <= (FULL if any(w.is_inference() for w in weights) else MOST // 4):
        return Contents(hashes, (total, total))
    watched = [content.pages.size for content in known if content.pages]
    most = _most_in_turn(len(known))
    limits = [min(max(size // SWEEP, LEAST), most) for size in (total - sum(watched), total)]
    return Contents(hashes, (limits[0], limits[1]), -(-len(watched) // SWEEP))


def _most_in_turn(count: int) -> int:
    return max(MOST - SAMPLE * count, MOST // 4)

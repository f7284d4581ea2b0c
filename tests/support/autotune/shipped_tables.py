"""The package's tables as tests ask them: of another GPU, at another batch."""

import functools
from itertools import starmap

from msgspec.structs import replace

from ipex_inductor import compat
from ipex_inductor.autotune import batches, select
from ipex_inductor.autotune.database import Records
from ipex_inductor.autotune.record import decode_problem, encode
from ipex_inductor.lowerings.select import library
from ipex_inductor.target import device

TABLES = sorted(select.SHIPPED.glob("*.jsonl"))
H200 = device.find_target("h200")


@functools.cache
def problems():
    """Those of ours in the H200's table."""
    return [r.problem for r in Records(*TABLES) if r.problem.op.startswith("ipex.")]


def offered_on(gpu):
    """The problems of ours in the H200's table, were they another's, and the H200's own choices."""
    return _offered_on(gpu, compat.TEMPLATES)


@functools.cache  # two seconds each
def _offered_on(gpu, templates):
    """The same by that torch's templates, which is the one that is known."""
    ours = problems()
    there = {encode(replace(p, arch=str(device.find_target(gpu)))): p for p in ours}
    offered = {key: [c.choice for c in library.calls(decode_problem(key))] for key in there}
    return offered, select.lookup([*map(encode, there.values())], None), there


def of_batch(size, problem):
    weights = batches.WEIGHTS.get(problem.op, (1,))

    def changed(number, operand):
        is_image = len(operand.shape) == 4 and number not in weights
        return replace(operand, shape=(size, *operand.shape[1:])) if is_image else operand

    return replace(problem, operands=tuple(starmap(changed, enumerate(problem.operands))))

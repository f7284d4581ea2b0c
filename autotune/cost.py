"""Cost model of Triton templates, fitted on records: good enough to rank, not to report.

The time is the largest of four that follow from the tiles: arithmetic, loads from the last cache,
memory traffic, and the latency of the steps. Each is scaled by a factor that depends on the shape
of the tile, and the launch time is a lower bound. The factors are fitted.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ipex_inductor.autotune.intensity import Extent, extent
from ipex_inductor.autotune.record import Choice, Problem, Value
from ipex_inductor.errors import TargetError
from ipex_inductor.target import device as target
from ipex_inductor.target.device import Target

FEATURES = 1  # version of the features that the factors depend on
SHARPNESS = 4.0  # of the smooth maximum: close to the maximum if the times differ much
RATES = {"bfloat16": "bf16", "float16": "fp16"}  # two bytes each
WIDTH = 2
LAST_CACHE = 5.5e12  # bytes/s of an H100; the factors absorb other devices' bandwidth
THREADS, BLOCKS, MOST_REGISTERS, OWN_REGISTERS = 2048, 32, 255, 48  # limits of a multiprocessor
LARGEST = 20.0  # largest plausible logarithm of a factor or a launch time


class Model(Value, frozen=True):
    """The factors for one architecture, and the dtypes that they were fitted on.

    `tiles` has one row for each of the four times; `launch` is the logarithm of microseconds.
    `templates` are the names of the templates in the training records. `error` is the median
    relative error on held-out problems.
    """

    arch: str
    dtypes: tuple[str, ...]
    tiles: tuple[tuple[float, ...], ...]
    launch: float
    templates: tuple[str, ...]
    error: float
    problems: int
    features: int = FEATURES

    def microseconds(self, problem: Problem, choice: Choice) -> float | None:
        """Return the predicted time in microseconds; None outside the model's scope.

        The scope is its architecture, its dtypes and its templates.
        """
        if problem.arch != self.arch or problem.operands[0].dtype not in self.dtypes:
            return None
        parts = parts_of(problem, choice) if choice.name in self.templates else None
        if parts is None:
            return None
        factors = [
            math.fsum(w * f for w, f in zip(row, parts.features, strict=True)) for row in self.tiles
        ]
        time = larger([*map(math.log, parts.times)], factors, self.launch)
        return math.exp(min(max(time, -LARGEST), LARGEST))


class Tile(msgspec.Struct, frozen=True):
    """The parameters of a template: tile sizes in M, N and K, pipeline stages and warps."""

    rows: int
    columns: int
    terms: int
    stages: int
    warps: int

    @property
    def accumulators(self) -> float:
        """Accumulator registers of one thread, in fp32."""
        return self.rows * self.columns / (32 * self.warps)


class Parts(msgspec.Struct, frozen=True):
    """The four times, in microseconds except for the last, and the features of their factors.

    The last time is a count of steps.
    """

    times: tuple[float, float, float, float]
    features: tuple[float, ...]


def parts_of(problem: Problem, choice: Choice) -> Parts | None:
    """Return the model's inputs for a template on a problem; None if they are not known."""
    device, size, tile = target_of(problem.arch), extent(problem), _tile_of(choice)
    rate = device and device.rate(RATES.get(problem.operands[0].dtype, ""))
    if device is None or size is None or tile is None or not rate or not size.result * size.terms:
        return None
    steps = math.ceil(size.terms / tile.terms)
    shared = tile.stages * (tile.rows + tile.columns) * tile.terms * WIDTH
    resident = min((device.shared_memory or 0) // shared, THREADS // 32 // tile.warps, BLOCKS)
    if not resident:
        return None
    registers = min(MOST_REGISTERS, tile.accumulators + OWN_REGISTERS) * 32 * tile.warps
    blocks = min(
        resident, max(1, int((device.registers or 0) // registers))
    )  # one that spills is still one
    processors = device.multiprocessors
    tiles = size.count * math.ceil(size.rows / tile.rows) * math.ceil(size.columns / tile.columns)
    waiting = math.ceil(tiles / processors)
    arithmetic = 2 * waiting * tile.rows * tile.columns * steps * tile.terms / (rate / processors)
    loaded = tiles * (tile.rows + tile.columns) * steps * tile.terms * WIDTH / LAST_CACHE
    latency = math.ceil(tiles / (processors * blocks)) * steps
    traffic = bytes_moved(problem, size) / (device.bandwidth or 1.0)
    times = (arithmetic * 1e6, loaded * 1e6, traffic * 1e6, float(latency))
    return Parts(times, _features(choice.name, tile, blocks, waiting))


def target_of(arch: str) -> Target | None:
    """Return the target device of `arch` if it has all facts the model needs; else None.

    These are bandwidth, rates, shared memory and registers.
    """
    try:
        device = target.find_target(arch)
    except TargetError:
        return None
    complete = device.bandwidth and device.rates and device.shared_memory and device.registers
    return device if complete else None


def load(folders: Sequence[Path], arch: str) -> Model | None:
    """Return the model of `arch` from the first of `folders` with a readable one; None without."""
    for folder in folders:
        try:
            model = msgspec.json.decode((folder / file_name(arch)).read_bytes(), type=Model)
        except (OSError, ValueError):  # errors of msgspec and of decoding text are ValueErrors
            continue
        if model.arch == arch and fits(model):
            return model
    return None


def file_name(arch: str) -> str:
    """Return the file name of the model of `arch`."""
    return f"cost-{arch.replace(':', '-')}.json"


def fits(model: Model) -> bool:
    """Return True if the model has this version's features and counts, and plausible values."""
    count = len(_features("", Tile(16, 16, 16, 1, 1), 1, 1))
    shaped = len(model.tiles) == 4 and all(len(row) == count for row in model.tiles)
    numbers = [*itertools.chain(*model.tiles), model.launch]
    supported = model.features == FEATURES and RATES.keys() >= {*model.dtypes}
    return shaped and supported and all(abs(number) <= LARGEST for number in numbers)


def _tile_of(choice: Choice) -> Tile | None:
    """Return the tile of a Triton template's parameters; None if it has none."""
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps")
    values = [choice.parameters.get(name) for name in names]
    sizes = [v for v in values if type(v) is int and v > 0]
    return Tile(*sizes) if len(sizes) == len(names) else None


def _features(name: str, tile: Tile, blocks: int, waiting: int) -> tuple[float, ...]:
    """Return the features of a tile: logarithms of its sizes, and products of them.

    Args:
        name: the template's name, which marks convolutions and batched GEMMs.
        tile: the tile.
        blocks: blocks that fit on one multiprocessor at once.
        waiting: blocks that each multiprocessor gets in all.
    """
    log = math.log2
    shape = [log(tile.rows) - 5, log(tile.columns) - 5, log(tile.terms) - 5]
    shape += [log(tile.warps) - 2, log(tile.stages) - 1.5]
    products = [a * b for a, b in itertools.combinations_with_replacement(shape, 2)]
    many = log(tile.accumulators) - 5
    shared = [log(blocks), log(min(blocks, waiting))]
    kind = [float("convolution" in name), float("bmm" in name)]
    return (1.0, *shape, *products, many, float(tile.accumulators >= 128), *shared, *kind)


def bytes_moved(problem: Problem, size: Extent) -> int:
    """Return the bytes of all operands and the result, each moved once."""
    operands = (
        math.prod(int(n) for n, step in zip(o.shape, o.stride, strict=True) if step)
        for o in problem.operands
    )
    return (size.result + sum(operands)) * WIDTH


def larger(times: Sequence[float], factors: Sequence[float], least: float) -> float:
    """Return a smooth maximum of the scaled times and of `least`; all values are logarithms."""
    parts = [SHARPNESS * (t + f) for t, f in zip(times, factors, strict=True)]
    parts.append(SHARPNESS * least)
    most = max(parts)
    return (most + math.log(math.fsum(math.exp(p - most) for p in parts))) / SHARPNESS

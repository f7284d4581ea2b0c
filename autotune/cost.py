"""How long a Triton template would take, by a model fitted on records: to rank, not to be believed.

The time is the larger of four that are known from the tiles: arithmetic, loads from the last cache,
traffic with memory, and latency of the steps; each stretched by a factor that depends on the shape
of the tile, and none shorter than a launch. The factors are what is fitted.
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

FEATURES = 1  # the version of what the factors depend on
SHARPNESS = 4.0  # of the larger of several times: near it where they are far from each other
RATES = {"bfloat16": "bf16", "float16": "fp16"}  # two bytes each
WIDTH = 2
LAST_CACHE = 5.5e12  # bytes/s, of an H100; the factors see to what another device has
THREADS, BLOCKS, MOST_REGISTERS, OWN_REGISTERS = 2048, 32, 255, 48  # of CUDA's multiprocessors
LARGEST = 20.0  # logarithm of a factor or a launch that can be meant


class Model(Value, frozen=True):
    """The factors for one architecture, and the dtypes that they were fitted on.

    `tiles` has a row for each of the four times, `launch` is the logarithm of microseconds.
    `templates` are the names of those that were met. `error` is the median relative error on
    problems it was not fitted on.
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
        """What it would take; None for what the model knows nothing of."""
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
    """What a template's parameters say."""

    rows: int
    columns: int
    terms: int
    stages: int
    warps: int

    @property
    def accumulators(self) -> float:
        """Registers of a thread that hold its share of the result, in fp32."""
        return self.rows * self.columns / (32 * self.warps)


class Parts(msgspec.Struct, frozen=True):
    """The four times, in microseconds but for the last, and what their factors depend on."""

    times: tuple[float, float, float, float]
    features: tuple[float, ...]


def parts_of(problem: Problem, choice: Choice) -> Parts | None:
    """What the model sees of a template on a problem; None if it cannot."""
    device, size, tile = described(problem.arch), extent(problem), _tile_of(choice)
    fast = device and device.rate(RATES.get(problem.operands[0].dtype, ""))
    if device is None or size is None or tile is None or not fast or not size.result * size.terms:
        return None
    steps = math.ceil(size.terms / tile.terms)
    shared = tile.stages * (tile.rows + tile.columns) * tile.terms * WIDTH
    room = min((device.shared_memory or 0) // shared, THREADS // 32 // tile.warps, BLOCKS)
    if not room:
        return None
    registers = min(MOST_REGISTERS, tile.accumulators + OWN_REGISTERS) * 32 * tile.warps
    blocks = min(room, max(1, int((device.registers or 0) // registers)))  # or it spills
    many = device.multiprocessors
    tiles = size.count * math.ceil(size.rows / tile.rows) * math.ceil(size.columns / tile.columns)
    waiting = math.ceil(tiles / many)
    arithmetic = 2 * waiting * tile.rows * tile.columns * steps * tile.terms / (fast / many)
    loaded = tiles * (tile.rows + tile.columns) * steps * tile.terms * WIDTH / LAST_CACHE
    latency = math.ceil(tiles / (many * blocks)) * steps
    traffic = moved(problem, size) / (device.bandwidth or 1.0)
    times = (arithmetic * 1e6, loaded * 1e6, traffic * 1e6, float(latency))
    return Parts(times, _features(choice.name, tile, blocks, waiting))


def described(arch: str) -> Target | None:
    """Its description, if that has all the facts that the model needs."""
    try:
        found = target.described(arch)
    except TargetError:
        return None
    known = found.bandwidth and found.rates and found.shared_memory and found.registers
    return found if known else None


def load(folders: Sequence[Path], arch: str) -> Model | None:
    """The model of `arch` in the first of `folders` that has one that can be read."""
    for folder in folders:
        try:
            model = msgspec.json.decode((folder / file_name(arch)).read_bytes(), type=Model)
        except (OSError, ValueError):  # msgspec's errors are such, and those of text too
            continue
        if model.arch == arch and fits(model):
            return model
    return None


def file_name(arch: str) -> str:
    """Of the model's file."""
    return f"cost-{arch.replace(':', '-')}.json"


def fits(model: Model) -> bool:
    """Whether the numbers are as this version means them, and as many."""
    count = len(_features("", Tile(16, 16, 16, 1, 1), 1, 1))
    shaped = len(model.tiles) == 4 and all(len(row) == count for row in model.tiles)
    numbers = [*itertools.chain(*model.tiles), model.launch]
    known = model.features == FEATURES and RATES.keys() >= {*model.dtypes}
    return shaped and known and all(abs(number) <= LARGEST for number in numbers)


def _tile_of(choice: Choice) -> Tile | None:
    """The tile of a Triton template's parameters; None for what has none."""
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps")
    values = [choice.parameters.get(name) for name in names]
    sizes = [v for v in values if type(v) is int and v > 0]
    return Tile(*sizes) if len(sizes) == len(names) else None


def _features(name: str, tile: Tile, blocks: int, waiting: int) -> tuple[float, ...]:
    """The tile's shape and products of its sizes; blocks on a multiprocessor at once."""
    log = math.log2
    shape = [log(tile.rows) - 5, log(tile.columns) - 5, log(tile.terms) - 5]
    shape += [log(tile.warps) - 2, log(tile.stages) - 1.5]
    products = [a * b for a, b in itertools.combinations_with_replacement(shape, 2)]
    many = log(tile.accumulators) - 5
    shared = [log(blocks), log(min(blocks, waiting))]
    kind = [float("convolution" in name), float("bmm" in name)]
    return (1.0, *shape, *products, many, float(tile.accumulators >= 128), *shared, *kind)


def moved(problem: Problem, size: Extent) -> int:
    """Bytes of all operands and the result, each moved once."""
    operands = (
        math.prod(int(n) for n, step in zip(o.shape, o.stride, strict=True) if step)
        for o in problem.operands
    )
    return (size.result + sum(operands)) * WIDTH


def larger(times: Sequence[float], factors: Sequence[float], least: float) -> float:
    """The larger of times that are stretched by factors, and of the least; all as logarithms."""
    parts = [SHARPNESS * (t + f) for t, f in zip(times, factors, strict=True)]
    parts.append(SHARPNESS * least)
    most = max(parts)
    return (most + math.log(math.fsum(math.exp(p - most) for p in parts))) / SHARPNESS

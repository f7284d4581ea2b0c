"""How long a kernel would take, by a model that is fitted on records: to rank, not to be believed.

A template's time is the larger of four that are known from its tiles: arithmetic, loads from the
last cache, traffic with memory, and latency of its steps; each stretched by a factor that depends
on the shape of the tile, and none shorter than a launch. A library's kernels are not known: they
have one factor of arithmetic and of traffic for each op. The factors are what is fitted.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ipex_inductor import target
from ipex_inductor.autotune.intensity import Extent, extent
from ipex_inductor.autotune.record import Choice, Problem, Value, encode
from ipex_inductor.errors import TargetError
from ipex_inductor.target import Target

SHARPNESS = 4.0  # of the larger of several times: near it where they are far from each other
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
RATES = {"bfloat16": "bf16", "float16": "fp16", "float32": "tf32"}
LAST_CACHE = 5.5e12  # bytes/s, of an H100; the factors see to what another device has
THREADS, BLOCKS, MOST_REGISTERS, OWN_REGISTERS = 2048, 32, 255, 48  # of CUDA's multiprocessors


class Model(Value, frozen=True):
    """The factors for one architecture and dtype.

    `tiles` has a row for each of the four times, `libraries` three numbers for each op; `launch` is
    the logarithm of microseconds. `templates` are the names of those that were met.
    `margins`: by op, how many times as fast as the library's kernel the model must say that a
    template is, for that to be true of problems it was not fitted on; ops that are not there are
    the library's. `error` is the median relative error on such problems.
    """

    arch: str
    dtypes: tuple[str, ...]
    tiles: tuple[tuple[float, ...], ...]
    launch: float
    libraries: dict[str, tuple[float, ...]]
    templates: tuple[str, ...]
    margins: dict[str, float]
    error: float
    problems: int

    def guess(self, problem: Problem, choices: Iterable[Choice]) -> "Guess | None":
        """The template that is to be taken unmeasured; None for none, which is the library's."""
        margin = self.margins.get(problem.op)
        library = self.microseconds(problem, Choice("library", problem.op))
        if margin is None or library is None:
            return None
        templates = [choice for choice in choices if choice.kind == "template"]
        said = {encode(c): (self.microseconds(problem, c), c) for c in templates}
        times = [(t, key, c) for key, (t, c) in said.items() if t is not None]
        if not times:
            return None
        time, _, choice = min(times, key=lambda each: each[:2])
        return Guess(choice, time, library) if time * margin <= library else None

    def microseconds(self, problem: Problem, choice: Choice) -> float | None:
        """What it would take; None for what the model knows nothing of."""
        if problem.arch != self.arch or problem.operands[0].dtype not in self.dtypes:
            return None
        device = described(problem.arch)
        size = extent(problem)
        if device is None or size is None:
            return None
        if choice.kind == "library":
            known = self.libraries.get(problem.op)
            return _library(_of_library(size, problem, device), known) if known else None
        tile = tile_of(choice)
        if tile is None or choice.name not in self.templates:
            return None
        parts = _of_template(size, problem, tile, device)
        if parts is None:
            return None
        shape = features(choice, tile, parts)
        factors = [math.fsum(w * f for w, f in zip(row, shape, strict=True)) for row in self.tiles]
        return math.exp(_larger([*map(math.log, parts.times)], factors, self.launch))


@dataclass(frozen=True)
class Guess:
    """A choice that nobody measured, and what the model says it takes, and the library's kernel."""

    choice: Choice
    microseconds: float
    library: float

    def __str__(self) -> str:
        """One line: what, how fast, against what, by whom."""
        given = "".join(f" {k}={v}" for k, v in self.choice.parameters.items())
        times = f"{self.microseconds:.3g} us, the library's {self.library:.3g}"
        return f"{self.choice.name}{given}: {times}, both by the cost model, not measured"


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
    """The four times, in microseconds but for the last; blocks on a multiprocessor at once."""

    times: tuple[float, float, float, float]
    blocks: int
    waiting: int  # blocks for each multiprocessor


def described(arch: str) -> Target | None:
    """The target, if the facts are known that the model needs."""
    try:
        device = target.described(arch)
    except TargetError:
        return None
    known = device.bandwidth and device.rates and device.shared_memory and device.registers
    return device if known else None


def tile_of(choice: Choice) -> Tile | None:
    """The tile of a Triton template's parameters; None for what has none."""
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps")
    values = [choice.parameters.get(name) for name in names]
    if any(type(v) is not int or v < 1 for v in values):
        return None
    return Tile(*(int(v) for v in values if v is not None))


def parts_of(problem: Problem, choice: Choice) -> Parts | None:
    """What the model sees of a template on a problem; None if it cannot."""
    device, size, tile = described(problem.arch), extent(problem), tile_of(choice)
    if device is None or size is None or tile is None or problem.operands[0].dtype not in BYTES:
        return None
    return _of_template(size, problem, tile, device)


def library_parts_of(problem: Problem) -> tuple[float, float] | None:
    """What the model sees of a library's kernel: arithmetic and traffic, in microseconds."""
    device, size = described(problem.arch), extent(problem)
    if device is None or size is None or problem.operands[0].dtype not in BYTES:
        return None
    return _of_library(size, problem, device)


def features(choice: Choice, tile: Tile, parts: Parts) -> list[float]:
    """What the factors depend on: the tile's shape and products of its sizes, and who shares."""
    log = math.log2
    shape = [log(tile.rows) - 5, log(tile.columns) - 5, log(tile.terms) - 5]
    shape += [log(tile.warps) - 2, log(tile.stages) - 1.5]
    products = [a * b for a, b in itertools.combinations_with_replacement(shape, 2)]
    many = log(tile.accumulators) - 5
    shared = [log(parts.blocks), log(min(parts.blocks, parts.waiting))]
    kind = [float("convolution" in choice.name), float("bmm" in choice.name)]
    return [1.0, *shape, *products, many, float(tile.accumulators >= 128), *shared, *kind]


def load(folders: Sequence[Path], arch: str) -> Model | None:
    """The model of `arch` in the first of `folders` that has one that can be read."""
    for folder in folders:
        file = folder / file_name(arch)
        try:
            model = msgspec.json.decode(file.read_bytes(), type=Model)
        except (OSError, msgspec.MsgspecError):
            continue
        if model.arch == arch and _fits(model):
            return model
    return None


def file_name(arch: str) -> str:
    """Of the model's file."""
    return f"cost-{arch.replace(':', '-')}.json"


def _fits(model: Model) -> bool:
    """Whether the numbers are as many as this version has features."""
    tile, parts = Tile(16, 16, 16, 1, 1), Parts((1.0, 1.0, 1.0, 1.0), 1, 1)
    count = len(features(Choice("template", "any"), tile, parts))
    rows = [*model.tiles, [model.launch], *model.libraries.values()]
    finite = all(math.isfinite(x) for row in rows for x in row)
    shaped = len(model.tiles) == 4 and all(len(row) == count for row in model.tiles)
    return finite and shaped and all(len(row) == 3 for row in model.libraries.values())


def _of_template(size: Extent, problem: Problem, tile: Tile, device: Target) -> Parts | None:
    """None where a block has not room enough."""
    width, fast = BYTES[problem.operands[0].dtype], _rate(problem, device)
    many = device.multiprocessors
    tiles = size.count * math.ceil(size.rows / tile.rows) * math.ceil(size.columns / tile.columns)
    steps = math.ceil(size.terms / tile.terms)
    shared = tile.stages * (tile.rows + tile.columns) * tile.terms * width
    registers = min(MOST_REGISTERS, tile.accumulators + OWN_REGISTERS) * 32 * tile.warps
    room = [(device.shared_memory or 0) // shared, THREADS // 32 // tile.warps, BLOCKS]
    blocks = min(*room, int((device.registers or 0) // registers))
    if blocks < 1:
        return None
    waiting = math.ceil(tiles / many)
    arithmetic = 2 * waiting * tile.rows * tile.columns * steps * tile.terms / (fast / many)
    loaded = tiles * (tile.rows + tile.columns) * steps * tile.terms * width / LAST_CACHE
    latency = math.ceil(tiles / (many * blocks)) * steps
    moved = _traffic(problem, size.result, device)
    times = (arithmetic * 1e6, loaded * 1e6, moved, float(latency))
    return Parts(times, blocks, waiting)


def _of_library(size: Extent, problem: Problem, device: Target) -> tuple[float, float]:
    arithmetic = 2 * size.result * size.terms / _rate(problem, device) * 1e6
    again = 2 * size.result if problem.epilogue else 0  # written, and read by another kernel
    return arithmetic, _traffic(problem, size.result + again, device)


def _traffic(problem: Problem, results: int, device: Target) -> float:
    """Microseconds of memory for all operands and so many results, each moved once."""
    moved = results + sum(math.prod(map(int, o.shape)) for o in problem.operands)
    return moved * BYTES[problem.operands[0].dtype] / (device.bandwidth or 1.0) * 1e6


def _rate(problem: Problem, device: Target) -> float:
    return device.rate(RATES[problem.operands[0].dtype]) or 1e12


def _library(times: Sequence[float], factors: Sequence[float]) -> float:
    return math.exp(_larger([*map(math.log, times)], factors[:2], factors[2]))


def _larger(times: Sequence[float], factors: Sequence[float], least: float) -> float:
    """The larger of times that are stretched by factors, and of the least; all as logarithms."""
    parts = [SHARPNESS * (t + f) for t, f in zip(times, factors, strict=True)]
    parts.append(SHARPNESS * least)
    most = max(parts)
    return (most + math.log(math.fsum(math.exp(p - most) for p in parts))) / SHARPNESS

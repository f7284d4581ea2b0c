"""How products are cut, by architecture: the shapes of matrix engines, and blocks as tables."""

from dataclasses import dataclass, replace

CPU = "cpu"
LARGE = "-ze-opt-large-register-file"  # 256 registers a thread on Intel's GPUs, half the threads


@dataclass(frozen=True)
class Tile:
    """A sub-group of SG lanes makes MT x NT tiles of TM x TN sums, TK terms at a time.

    SGM x SGN sub-groups are a work-group; it gathers STEP terms of its rows at a time. `matrix`:
    by a matrix engine, whose shape TM, TN and TK are; `dots`: by a CPU's products of pairs of bf16,
    a vector for a row of a tile; otherwise a lane has a column. TM is 1 but for engines.
    """

    TM: int
    TN: int
    TK: int
    MT: int
    NT: int
    SGM: int
    SGN: int
    SG: int
    STEP: int
    matrix: bool = False
    large: bool = False
    dots: bool = False

    @property
    def rows(self) -> int:
        """Of a work-group."""
        return self.TM * self.MT * self.SGM

    @property
    def columns(self) -> int:
        """Of a work-group."""
        return self.TN * self.NT * self.SGN

    @property
    def block(self) -> str:
        """Its name, as graphs and records have it: `4x4 by 4x4` tiles and sub-groups."""
        lanes = "" if self.matrix else " in pairs" if self.dots else " in lanes"
        return f"{self.MT}x{self.NT} by {self.SGM}x{self.SGN}{lanes}"

    @property
    def pairs(self) -> bool:
        """Whether it may hold the sums of two products; `dots` has memory for those of one."""
        if self.dots:
            return False
        most = MOST_PAIRED[self.TN if self.matrix else 0] * (1 + self.large)
        tiles = self.MT * self.NT
        return tiles <= most

    @property
    def threads(self) -> int:
        """Work-items of a work-group."""
        return self.SGM * self.SGN * self.SG


@dataclass(frozen=True)
class Engine:
    """A matrix engine: rows, columns and lanes; the bytes of a row that it multiplies at a time.

    `blocks` are those of `Tile`: MT, NT, SGM, SGN, large.
    """

    rows: int
    columns: int
    lanes: int
    depth: int
    dtypes: tuple[str, ...]
    blocks: tuple[tuple[int, int, int, int, bool], ...]


# MT, NT, SGM, SGN, large registers. Derived: these are free of spills in native code of each
# architecture (`make sycl-aot`) and within its local memory; their speed was measured nowhere.
WIDE_BLOCKS = ((4, 4, 4, 4, True), (4, 2, 4, 4, False), (2, 2, 2, 4, False), (1, 2, 1, 4, False))
NARROW_BLOCKS = ((4, 2, 4, 4, True), (2, 2, 4, 4, False), (1, 2, 1, 4, False))
# Derived too, for what no engine multiplies: fp32, and terms that do not fill a step.
XE_LANES = ((8, 2, 2, 4, False), (4, 2, 4, 2, False), (1, 2, 1, 4, False))
# Of AMX the driver's compiler crashes on more rows than columns, and on 4 x 4.
AMX_BLOCKS = ((2, 2, 1, 1, False), (1, 2, 1, 1, False))
# By the floats of a vector: sums and factors fill the 32 registers of AVX-512, the 16 of AVX2; one
# sub-group, as barriers cost a pass each.
CPU_LANES = {
    16: ((6, 4, 1, 1, False), (6, 2, 1, 1, False), (1, 4, 1, 1, False)),
    8: ((5, 1, 1, 1, False), (2, 2, 1, 1, False), (1, 4, 1, 1, False)),
}
CPU_DOTS = ((6, 4, 1, 1, False),)  # as by lanes
MOST_PAIRED = {16: 4, 8: 2, 0: 12}  # tiles of each product, by their columns in an engine

# As drivers of these devices list their combinations; LNL's and PTL's are PVC's.
XE_WIDE = Engine(8, 16, 16, 32, ("bf16", "fp16", "int8"), WIDE_BLOCKS)
XE_NARROW = Engine(8, 8, 8, 32, ("bf16", "fp16", "int8"), NARROW_BLOCKS)
AMX = Engine(16, 16, 16, 64, ("bf16", "int8"), AMX_BLOCKS)
ENGINES = {
    "xe:12.55": XE_NARROW,  # DG2
    "xe:12.60": XE_WIDE,  # PVC
    "xe:12.74": XE_NARROW,  # ARL-H
    "xe:20.1": XE_WIDE,  # BMG
    "xe:20.4": XE_WIDE,  # LNL
    "xe:30.0": XE_WIDE,  # PTL
    CPU: AMX,  # where it has that
}
NAMES = {
    "pvc": "xe:12.60",
    "bmg": "xe:20.1",
    "lnl": "xe:20.4",
    "ptl": "xe:30.0",
    "dg2": "xe:12.55",
    "arl": "xe:12.74",
}

LANES = 16
XE_STEP, CPU_STEP = 32, 256  # terms that are gathered at a time
DOTS_STEP = 32  # terms between which sums lie in memory


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}[dtype]


def tiles(
    arch: str, dtype: str, matrix: bool = True, vector: int = 16, dots: bool = False
) -> tuple[Tile, ...]:
    """Those for products of `dtype` on an architecture, the widest first.

    With `matrix` its engine's come before those without, if it has one for that type; `vector`:
    the floats that a CPU adds at once; `dots`: whether it multiplies pairs of bf16. Raises
    `KeyError` for an architecture that the tables lack.
    """
    engine = ENGINES[arch]
    on_cpu = CPU_LANES[16 if vector >= 16 else 8], CPU_STEP
    lanes, step = on_cpu if arch == CPU else (XE_LANES, XE_STEP)
    few = Tile(1, LANES, 4, 1, 1, 1, 1, LANES, step)
    shape = replace(
        few,
        TM=engine.rows,
        TN=engine.columns,
        TK=engine.depth // itemsize(dtype),
        SG=engine.lanes,
        STEP=max(step, engine.depth),
        matrix=True,
    )
    found = [(shape, block) for block in engine.blocks if matrix and dtype in engine.dtypes]
    if dots and dtype == "bf16" and arch == CPU and vector >= 16:
        pairs = replace(few, TK=DOTS_STEP, dots=True)
        found += [(pairs, block) for block in CPU_DOTS]
    found += [(few, block) for block in lanes]
    return tuple(
        replace(tile, MT=m, NT=n, SGM=down, SGN=across, large=large)
        for tile, (m, n, down, across, large) in found
    )


def blocks() -> tuple[str, ...]:
    """The names of all that are for Intel's GPUs."""
    archs = (arch for arch in ENGINES if arch != CPU)
    found = (tile.block for arch in archs for tile in tiles(arch, "bf16"))
    return tuple(dict.fromkeys(found))

"""Tilings of GEMMs by architecture: the shapes of matrix engines, and tables of blocks."""

from dataclasses import dataclass, replace

CPU = "cpu"
LARGE = "-ze-opt-large-register-file"  # 256 registers a thread on Intel's GPUs, half the threads


@dataclass(frozen=True)
class Tile:
    """The work of a sub-group: SG lanes compute MT x NT tiles of TM x TN sums, TK of K at a time.

    SGM x SGN sub-groups are a work-group, which gathers STEP of K of its rows at a time. `matrix`:
    by a matrix engine, whose shape is TM, TN and TK; `dots`: by a CPU's products of pairs of bf16,
    a vector for a row of a tile; otherwise a lane has a column. TM is 1 except for engines.
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
        """Return the rows (M) of a work-group."""
        return self.TM * self.MT * self.SGM

    @property
    def columns(self) -> int:
        """Return the columns (N) of a work-group."""
        return self.TN * self.NT * self.SGN

    @property
    def block(self) -> str:
        """Return the name in graphs and records: `4x4 by 4x4` tiles and sub-groups."""
        lanes = "" if self.matrix else " in pairs" if self.dots else " in lanes"
        return f"{self.MT}x{self.NT} by {self.SGM}x{self.SGN}{lanes}"

    @property
    def pairs(self) -> bool:
        """Return whether the sums of two GEMMs fit (GLU); `dots` has memory for one GEMM."""
        if self.dots:
            return False
        most = MOST_PAIRED[self.TN if self.matrix else 0] * (1 + self.large)
        tiles = self.MT * self.NT
        return tiles <= most

    @property
    def threads(self) -> int:
        """Return the work-items of a work-group."""
        return self.SGM * self.SGN * self.SG


@dataclass(frozen=True)
class Engine:
    """A matrix engine: rows, columns, lanes, and `depth`, the bytes of a row per multiplication.

    `blocks` are fields of `Tile`: MT, NT, SGM, SGN, large.
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
# Derived too, for GEMMs without an engine: fp32, and a K that does not fill a step.
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
    CPU: AMX,  # if the CPU has it
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
XE_STEP, CPU_STEP = 32, 256  # elements of K that are gathered at a time
DOTS_STEP = 32  # elements of K after which sums are stored to memory


def itemsize(dtype: str) -> int:
    """Return the bytes of an element."""
    return {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}[dtype]


def tiles(
    arch: str, dtype: str, matrix: bool = True, vector: int = 16, dots: bool = False
) -> tuple[Tile, ...]:
    """Return the tiles for GEMMs of `dtype` on an architecture, the widest first.

    Args:
        arch: the architecture.
        dtype: the dtype's name in kernels, such as `bf16`.
        matrix: put the matrix engine's tiles first, if there is one for the dtype.
        vector: the floats in a vector register of a CPU.
        dots: whether a CPU multiplies pairs of bf16.

    Raises:
        KeyError: if the tables lack the architecture.
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
    shapes = [(shape, block) for block in engine.blocks if matrix and dtype in engine.dtypes]
    if dots and dtype == "bf16" and arch == CPU and vector >= 16:
        pairs = replace(few, TK=DOTS_STEP, dots=True)
        shapes += [(pairs, block) for block in CPU_DOTS]
    shapes += [(few, block) for block in lanes]
    return tuple(
        replace(tile, MT=m, NT=n, SGM=down, SGN=across, large=large)
        for tile, (m, n, down, across, large) in shapes
    )


def blocks() -> tuple[str, ...]:
    """Return the names of all tiles for Intel GPUs."""
    archs = (arch for arch in ENGINES if arch != CPU)
    names = (tile.block for arch in archs for tile in tiles(arch, "bf16"))
    return tuple(dict.fromkeys(names))

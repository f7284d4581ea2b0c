"""Every SYCL template on Intel's CPU device, against fp64, into memory full of NaN.

What a matrix engine would do is also done by lanes, on any CPU (support/sycl_engine.cpp): with
that, the very kernels of the GPUs run here, all but the engine's own instructions.
"""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.ops.common.epilogue import UNARY
from ipex_inductor.ops.conv.sycl import COLUMNS, RUN, pack_grouped, pack_kernel, pack_weight
from ipex_inductor.templates.sycl import calls, grouped, norm, product, words
from ipex_inductor.templates.sycl.kernel import part, prevent_unrolling
from ipex_inductor.templates.sycl.product import Epilogue, Kernel, Operands
from ipex_inductor.templates.sycl.tiles import AMX, CPU, ENGINES, XE_NARROW, XE_WIDE, tiles
from support.cases import sycl_cases as cases
from support.cases.sycl_cases import (
    ADDED,
    CONV,
    GROUPED,
    LINEAR,
    NORM,
    WORDS,
    amid_nan,
    close,
    drawn,
    finished,
    made_of,
)
from support.sycl_device import needs_sycl

pytestmark = [needs_sycl, pytest.mark.timeout(900)]
EMULATED = Path(__file__).parents[2] / "support" / "sycl_engine.cpp"


@pytest.fixture(scope="module")
def device():
    from ipex_inductor.templates.sycl.device import device_of

    return device_of(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _nan_in_new_memory():
    """An element that a kernel leaves out is not a number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_lanes(source):
    """The same kernel with an engine made of lanes; written out, loops take 20 times as long."""
    engine = part("engine.cpp")
    assert engine in source.text
    text = prevent_unrolling(source.text.replace(engine, EMULATED.read_text()))
    return dataclasses.replace(source, text=text, needs=(), options=(), native=())


def scale_of(dtype, columns):
    return torch.rand(columns) / 1000 if dtype == "int8" else None


def check_linear(device, source, tile, dtype, epilogue, scalars=(), shapes=LINEAR, draw=drawn):
    of = WORDS[made_of(dtype)]
    for number, (rows, terms, columns) in enumerate(shapes):
        x = amid_nan(draw((*rows, terms), WORDS[dtype]))
        weight = draw((columns, terms), WORDS[dtype])
        bias = drawn((columns,), of) if number % 2 else None
        other = drawn((*rows, columns), of) if epilogue.binary != "none" else None
        scale = scale_of(dtype, columns)
        gate = None
        if epilogue.gated:
            gate = draw((columns, terms), WORDS[dtype]), drawn((columns,), of)
        second = gate and (pack_weight(gate[0]), gate[1])
        operands = Operands(bias, other, words.scalars(epilogue.unary, scalars), scale, second)
        kernel = Kernel(device, source, tile)
        found = product.linear(kernel, x, pack_weight(weight), columns, operands, of)
        wanted, size = sums_of(cases.linear, x, weight, bias, scale)
        wanted, size = finished(wanted, size, epilogue.binary, epilogue.unary, scalars, other)
        if gate:
            second, beside = cases.linear(x, *gate)
            wanted, size = wanted * second, size * beside
        assert found.dtype == of
        assert close(found, wanted, size), f"{rows} x {terms} -> {columns}"


def sums_of(reference, x, weight, bias, scale, *window):
    """int8's are scaled, and only then is the bias added."""
    if scale is None:
        return reference(x, weight, bias, *window)
    around = (len(scale), 1, 1) if window else (-1,)
    by, beside = scale.double().view(around), 0 if bias is None else bias.double().view(around)
    sums, size = reference(x, weight, None, *window)
    return sums * by + beside, size * by + abs(beside)


def check_conv(device, source, tile, dtype, epilogue, shapes=CONV):
    of = WORDS[made_of(dtype)]
    for number, (image, columns, size, *around) in enumerate(shapes):
        window = cases.window(size, *around)
        x = drawn(image, WORDS[dtype]).to(memory_format=torch.channels_last)
        weight = drawn((columns, image[1], *size), WORDS[dtype])
        bias, scale = drawn((columns,), of) if number % 2 else None, scale_of(dtype, columns)
        wanted, magnitude = sums_of(cases.conv, x, weight, bias, scale, window)
        other = None
        if epilogue.binary != "none":
            other = drawn(wanted.shape, of).to(memory_format=torch.channels_last)
        kernel, packed = Kernel(device, source, tile), pack_kernel(weight, window)
        operands = Operands(bias, other, scale=scale)
        found = product.conv(kernel, x, packed, columns, window, operands, of)
        wanted = finished(wanted, magnitude, epilogue.binary, epilogue.unary, (), other)
        assert close(found, *wanted), f"{image} -> {columns}, {window}"
        assert found.is_contiguous(memory_format=torch.channels_last)


VECTORS = (16, 8)  # floats that a CPU adds at once; both kinds of blocks run on either
LANES = [(d, n, v) for v in VECTORS for d in WORDS for n in range(len(tiles(CPU, d, False, v)))]
SLOW = pytest.mark.slow


def apart(quick, every):
    """All of them as parameters, those that are not `quick` marked as slow."""
    rest = [each for each in every if each not in quick]
    return [*quick, *(pytest.param(*each, marks=SLOW) for each in rest)]


PLAIN, FUSED, PAIR = Epilogue(), Epilogue("add", "gelu"), Epilogue("none", "silu", True)


@pytest.mark.parametrize(
    ("dtype", "number", "vector", "epilogue"),
    apart(
        [
            ("bf16", 0, 16, FUSED),
            ("fp32", 0, 8, FUSED),
            ("fp32", 1, 16, PAIR),
            ("fp16", 1, 8, FUSED),
            ("int8", 0, 16, PLAIN),
        ],
        [
            (*lanes, epilogue)
            for lanes, epilogue in itertools.product(LANES, (PLAIN, FUSED, PAIR))
            if not (epilogue.gated and lanes[0] == "int8")
        ],
    ),
    ids=str,
)
def test_linear(device, dtype, number, vector, epilogue):
    tile = tiles(CPU, dtype, False, vector)[number]
    if epilogue.gated and not tile.pairs:
        pytest.skip("the tile is for one product")
    source = product.source(tile, CPU, "rows", dtype, made_of(dtype), epilogue)
    check_linear(device, source, tile, dtype, epilogue)


@pytest.mark.parametrize(
    ("dtype", "number", "vector", "epilogue"),
    apart(
        [("bf16", 0, 8, FUSED), ("fp32", 0, 8, FUSED), ("int8", 1, 16, FUSED)],
        [(*lanes, epilogue) for lanes, epilogue in itertools.product(LANES, (PLAIN, FUSED))],
    ),
    ids=str,
)
def test_conv(device, dtype, number, vector, epilogue):
    tile = tiles(CPU, dtype, False, vector)[number]
    source = product.source(tile, CPU, "window", dtype, made_of(dtype), epilogue)
    check_conv(device, source, tile, dtype, epilogue)


@pytest.mark.parametrize("epilogue", [PLAIN, FUSED], ids=str)
@pytest.mark.parametrize("gather", ["rows", "window"])
def test_pairs_by_an_instruction(device, gather, epilogue):
    """On a CPU that has it; there it comes first for many rows, and for one row it does not."""
    if not device.facts["dots"]:
        pytest.skip("this CPU multiplies no pairs of bf16, or SYCL's driver does not know of it")
    (tile,) = (tile for tile in tiles(CPU, "bf16", *calls.engines(device)) if tile.dots)
    source, chosen = calls.source_of(CPU, "bf16", gather, False, epilogue, "", False, 16, True)
    assert chosen == tile
    assert "vdpbf16ps" in source.text
    assert not calls.source_of(CPU, "bf16", gather, True, epilogue, "", False, 16, True)[1].dots
    check = check_linear if gather == "rows" else check_conv
    check(device, source, tile, "bf16", epilogue)


SCALARS = {"pow": (3.0,), "elu": (0.7,), "leaky_relu": (0.2,), "hardtanh": (-0.5, 0.8)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unary", "binary"),
    [*((unary, "add") for unary in UNARY), *(("none", binary) for binary in words.BINARY)],
)
def test_words(device, unary, binary):
    """In fp32, so that only the device's own functions are between it and fp64."""
    tile, epilogue = tiles(CPU, "fp32", matrix=False)[-1], Epilogue(binary, unary)
    source = product.source(tile, CPU, "rows", "fp32", "fp32", epilogue)
    scalars, x, other = SCALARS.get(unary, ()), torch.rand(7, 40) + 0.1, torch.rand(7, 19) / 8
    weight = torch.rand(19, 40) / 40 + 0.1
    addend = other if binary != "none" else None
    operands = Operands(None, addend, words.scalars(unary, scalars))
    found = product.linear(Kernel(device, source, tile), x, pack_weight(weight), 19, operands)
    wanted, _ = finished(*cases.linear(x, weight, None), binary, unary, scalars, other)
    # exp and the cube are as steep as they are large here.
    assert ((found - wanted).abs() <= 4 * ADDED * (1 + wanted.abs())).all()


def test_every_word_of_an_epilogue_is_known():
    from ipex_inductor.ops.common.epilogue import BINARY

    assert [*words.UNARY] == [*UNARY]
    assert [*words.BINARY] == [*BINARY]


@pytest.mark.parametrize("unary", ["relu", "hardtanh", "hardswish", "leaky_relu"])
def test_what_is_not_a_number_stays_that(unary):
    """`fmax(x, 0)` is 0 of NaN, which torch's relu is not."""
    assert "fmax" not in words.UNARY[unary]
    assert "fmin" not in words.UNARY[unary]


@functools.cache
def of_grouped(dtype, epilogue):
    return grouped.source(CPU, dtype, epilogue)


@pytest.mark.parametrize(
    ("dtype", "epilogue"),
    apart([("bf16", FUSED)], [*itertools.product(("fp32", "fp16", "bf16"), (PLAIN, FUSED))]),
    ids=str,
)
def test_grouped(device, dtype, epilogue):
    for number, (image, columns, groups, size, *around) in enumerate(GROUPED):
        window = cases.window(size, *around)
        x = drawn(image, WORDS[dtype]).to(memory_format=torch.channels_last)
        weight = drawn((columns, image[1] // groups, *size), WORDS[dtype])
        bias = drawn((columns,), WORDS[dtype]) if number % 2 else None
        sums, magnitude = cases.conv(x, weight, bias, window, groups)
        other = drawn(sums.shape, WORDS[dtype]) if epilogue.binary != "none" else None
        kernel, operands = of_grouped(dtype, epilogue), Operands(bias, other)
        found = grouped.conv(device, kernel, x, pack_grouped(weight), window, groups, operands)
        wanted = finished(sums, magnitude, epilogue.binary, epilogue.unary, (), other)
        assert close(found, *wanted), f"{image} -> {columns} in {groups}, {window}"


@pytest.mark.parametrize(
    ("dtype", "centred"),
    apart(
        [("bf16", True), ("fp32", False)],
        [*itertools.product(("fp32", "fp16", "bf16"), (True, False))],
    ),
)
def test_norm(device, dtype, centred):
    """What was added is torch's to the bit; the rest is the norm of that, in fp64."""
    source, eps = norm.source(CPU, dtype, centred), 1e-5
    for number, (rows, size) in enumerate(NORM):
        x, other = (amid_nan(drawn((*rows, size), WORDS[dtype])) for _ in range(2))
        weight = drawn((size,), WORDS[dtype]) if number % 3 else None
        bias = drawn((size,), WORDS[dtype]) if centred and number % 2 else None
        for beside in (None, other):
            found, added = norm.norm(device, source, x, weight, bias, eps, beside)
            whole = x if beside is None else x + beside
            assert torch.equal(added, whole)
            given = whole.double(), (size,), None if weight is None else weight.double()
            wanted = F.rms_norm(*given, eps)
            if centred:
                wanted = F.layer_norm(*given, None if bias is None else bias.double(), eps)
            # What cancels in `x - mean` had three digits before the point, at most.
            assert close(found, wanted, 8 * torch.ones(())), f"{rows} x {size}"


def every_tile():
    """Those of each matrix engine: as they stand, and what they multiply."""
    for name, engine in (("wide", XE_WIDE), ("narrow", XE_NARROW), ("amx", AMX)):
        arch = next(arch for arch, of in ENGINES.items() if of is engine)
        for dtype in engine.dtypes:
            for number in range(len(engine.blocks)):
                yield name, arch, dtype, number


@pytest.mark.parametrize(
    ("name", "arch", "dtype", "number", "gather"),
    apart(
        [("wide", "xe:12.60", "bf16", 2, "window")],
        [(*tile, gather) for tile in every_tile() for gather in ("rows", "window")],
    ),
)
def test_kernels_of_matrix_engines_by_lanes(device, name, arch, dtype, number, gather):
    """A work-group of a GPU's size gathers, multiplies, and writes; tails are the usual ones."""
    tile = tiles(arch, dtype)[number]
    assert tile.matrix
    made = product.source(tile, arch, gather, dtype, made_of(dtype), FUSED)
    check = check_linear if gather == "rows" else check_conv
    check(device, by_lanes(made), tile, dtype, FUSED)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("arch", ["xe:12.60", "xe:12.55"])
def test_pairs_of_matrix_engines_by_lanes(device, arch, dtype):
    for tile in tiles(arch, dtype):
        if tile.matrix and tile.pairs:
            made = product.source(tile, arch, "rows", dtype, dtype, PAIR)
            check_linear(device, by_lanes(made), tile, dtype, PAIR)


# What the compiler crashes with where it takes a CPU for one without AMX, and the device does not.
NO_TILES = "Cannot select: intrinsic %llvm.x86.tilezero"


def test_a_matrix_engine_itself(device):
    """In a process of its own: the CPU's compiler crashes on some shapes of AMX."""
    if not device.facts["matrix"]:
        pytest.skip("this CPU has no matrix engine that SYCL's device knows")
    program = (
        "import sys, test_sycl_templates as t, torch\n"
        "from ipex_inductor.templates.sycl.device import device_of\n"
        "sys.excepthook = lambda kind, e, trace: print(e, vars(e).get('log'), file=sys.stderr)\n"
        "device = device_of(torch.device('cpu'))\n"
        "for dtype in t.AMX.dtypes:\n"
        "  for tile in t.tiles(t.CPU, dtype):\n"
        "    if tile.matrix:\n"
        "      for gather, check in (('rows', t.check_linear), ('window', t.check_conv)):\n"
        "        out = t.made_of(dtype)\n"
        "        source = t.product.source(tile, t.CPU, gather, dtype, out, t.FUSED)\n"
        "        check(device, source, tile, dtype, t.FUSED)\n"
    )
    path = [str(Path(__file__).parent), str(Path(__file__).parents[2]), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    if NO_TILES in done.stderr:
        pytest.skip("the compiler of Intel's CPU device has no AMX instructions for this CPU")
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_weight_is_packed_in_words():
    weight = torch.arange(3 * 5, dtype=torch.bfloat16).view(3, 5)
    found = pack_weight(weight)
    assert found.shape == (1, 16, 64, 2)
    assert torch.equal(found[0, :, :3].permute(1, 0, 2).reshape(3, 32)[:, :5], weight)
    assert found.count_nonzero() == weight.count_nonzero(), "all else is zero"


def test_blocks_divide_what_weights_are_filled_up_to():
    for arch, dtype in itertools.product(ENGINES, WORDS):
        for tile in tiles(arch, dtype, dots=True):
            depth = RUN // WORDS[dtype].itemsize
            assert depth % tile.TK == 0
            assert tile.STEP % tile.TK == 0
            assert tile.STEP % tile.SG == 0
            assert COLUMNS % (tile.TN * tile.NT) == 0

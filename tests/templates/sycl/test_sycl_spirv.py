"""SPIR-V of templates in SYCL: what a device is told of sizes, arguments and matrix engines."""

import itertools
import struct

import pytest
import torch

from ipex_inductor.ops.conv.sycl import COLUMNS
from ipex_inductor.templates.sycl import product, worker
from ipex_inductor.templates.sycl.device import device_of
from ipex_inductor.templates.sycl.product import Epilogue
from ipex_inductor.templates.sycl.source import Entry, Source
from ipex_inductor.templates.sycl.tiles import CPU, tiles
from support.cases.sycl_cases import WORDS, made_of
from support.sycl_device import HEAD, needs_sycl

pytestmark = needs_sycl

# SPIR-V's numbers (Khronos' specification, 3.6 and 3.32): instructions, modes.
ENTRY, MODE, FUNCTION, PARAMETER = 15, 16, 54, 55
LOCAL_SIZE, SUBGROUP_SIZE = 17, 35
# Of SPV_KHR_cooperative_matrix and, bf16's flag, SPV_INTEL_joint_matrix.
INT, FLOAT, CONSTANT, PHI, MATRIX, LOAD, MULTIPLY = 21, 22, 43, 245, 4456, 4457, 4459
SUB_GROUP, A, B, SUMS, ROWS, PACKED = 3, 0, 1, 2, 0, 2
SIGNED, BF16 = 0x1 | 0x2, 0x40


def instructions(spirv):
    """Each with its operands."""
    numbers, at = struct.unpack(f"<{len(spirv) // 4}I", spirv), 5
    while at < len(numbers):
        size = numbers[at] >> 16
        yield numbers[at] & 0xFFFF, numbers[at + 1 : at + size]
        at += size


def spirv_of(source):
    facts = device_of(torch.device("cpu")).facts
    return [*instructions(worker.compile_source(source, facts, native=False).spirv)]


def test_a_kernel_says_its_sizes():
    """As attributes: the compiler of 2025.3 drops them where they are properties."""
    tile = tiles(CPU, "fp32", matrix=False)[-1]
    source = product.source(tile, CPU, "rows", "fp32", "fp32", Epilogue())
    found = spirv_of(source)
    modes = {rest[1]: rest[2:] for instruction, rest in found if instruction == MODE}
    assert modes[SUBGROUP_SIZE] == (tile.SG,)
    assert modes[LOCAL_SIZE] == (tile.SG * tile.SGM * tile.SGN, 1, 1)


@pytest.mark.parametrize(
    ("dtype", "term", "summed", "flags"),
    [
        ("bf16", (INT, 16), (FLOAT, 32), BF16),
        ("fp16", (FLOAT, 16), (FLOAT, 32), 0),
        ("int8", (INT, 8), (INT, 32), SIGNED),
    ],
)
def test_what_a_matrix_engine_is_told(dtype, term, summed, flags):
    """What no CPU here can run: shapes, types, how rows and weights lie, what the bits mean."""
    tile = tiles("xe:12.60", dtype)[2]
    source = product.source(tile, "xe:12.60", "rows", dtype, made_of(dtype), Epilogue())
    found = spirv_of(source)
    number = {rest[1]: rest[2] for instruction, rest in found if instruction == CONSTANT}
    scalar = {rest[0]: (i, rest[1]) for i, rest in found if i in (INT, FLOAT)}
    matrices = {
        (scalar[rest[1]], *(number[at] for at in rest[2:])): rest[0]
        for instruction, rest in found
        if instruction == MATRIX
    }
    rows = (term, SUB_GROUP, tile.TM, tile.TK, A)
    columns = (term, SUB_GROUP, tile.TK, tile.TN, B)
    sums = (summed, SUB_GROUP, tile.TM, tile.TN, SUMS)
    assert matrices.keys() == {rows, columns, sums}
    loads = [(r[0], *(number[at] for at in r[3:5])) for i, r in found if i == LOAD]
    line = COLUMNS * 4 // WORDS[dtype].itemsize
    assert sorted(loads) == sorted(
        [(matrices[rows], ROWS, tile.STEP)] * tile.MT
        + [(matrices[columns], PACKED, line)] * tile.NT
    )
    mads = [(rest[0], rest[5]) for instruction, rest in found if instruction == MULTIPLY]
    assert mads == [(matrices[sums], flags)] * (tile.MT * tile.NT)
    # A loop that hands them on has them twice: larger blocks then spill on every GPU.
    assert not [1 for i, rest in found if i == PHI and rest[0] in matrices.values()]


def test_a_kernel_keeps_what_it_does_not_read():
    """The compiler of 2025.3 takes such arguments away, if it may: all behind them are others."""
    text = "KERNEL f(const float* x, long n, float* y) { *y = 1; }\n"
    source = Source(HEAD + text, (Entry("f", ("*", "i64", "*")),))
    found = spirv_of(source)
    (kernel,) = (rest[1] for instruction, rest in found if instruction == ENTRY)
    begin = next(n for n, (i, rest) in enumerate(found) if i == FUNCTION and rest[1] == kernel)
    taken = itertools.takewhile(lambda each: each[0] == PARAMETER, found[begin + 1 :])
    assert len([*taken]) == 3

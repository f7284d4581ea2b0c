"""Problems written by hand."""

from pathlib import Path

import pytest

from ipex_inductor.autotune.record import encode
from ipex_inductor.errors import ArgumentError
from ipex_inductor.lowerings.problem.shapes import problems

pytestmark = pytest.mark.unit

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "problems" / "tuning.txt"


def read(*lines):
    return list(problems(lines, "sm_90:test", {"threads": 2}, "file"))


def test_a_line_says_op_dtype_shapes_constants_and_epilogue():
    (found,) = read("aten.addmm.default bfloat16 8 4x6 6x8:T 4x8 alpha=2 -> aten.add.Tensor(y, x3)")
    assert found.op == "aten.addmm.default"
    assert [o.shape for o in found.operands] == [(8,), (4, 6), (6, 8), (4, 8)]
    assert [o.stride for o in found.operands] == [(1,), (6, 1), (1, 6), (8, 1)]
    assert {o.dtype for o in found.operands} == {"bfloat16"}
    assert (found.constants, found.epilogue) == ({"alpha": 2}, "aten.add.Tensor(y, x3)")
    assert (found.arch, found.settings) == ("sm_90:test", {"threads": 2})


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ("2x3x4x5:L", (60, 1, 15, 3)),
        ("2x3x4:L", (12, 1, 3)),
        ("2x3x4:T", (12, 1, 3)),
        ("2x3x4x5", (60, 20, 5, 1)),
    ],
)
def test_layouts(shape, stride):
    (found,) = read(f"aten.relu.default float32 {shape}")
    assert found.operands[0].stride == stride


def test_a_problem_of_a_record_is_a_line_as_well():
    (found,) = read("aten.mm.default float32 4x6 6x8")
    assert read("# comment", "", encode(found).decode(), "  ") == [found]


def test_constants_are_literals():
    line = "aten.convolution.default float32 1x4x9x9:L 6x4x3x3 bias=None stride=1,2 padding=1,1 "
    (found,) = read(line + "dilation=1,1 transposed=False output_padding=0,0 groups=1")
    assert found.constants["stride"] == (1, 2)
    assert found.constants["transposed"] is False
    assert found.constants["bias"] is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("aten.mm.default float32 4x6 7x8", "same reduction dim|cannot be multiplied"),
        ("aten.nothing.default float32 4", "nothing"),
        ("aten.mm.default float32 4x6 6by8", "'6by8' is no shape"),
        ("aten.mm.default float33 4x6 6x8", "float33"),
        ("aten.relu.default float32 4:T", "no dimensions to move"),
        ("aten.mm.default", "not enough values"),
        ("aten.mm.default float32 4x6 6x8 -> open('x')", "not enough values"),
        ("aten.mm.default float32 4x6 6x8 -> y.__class__", "malformed"),
        ("aten.split.Tensor float32 4x6 split_size=2", "does not give one tensor"),
        ('{"op": 7}', "Expected `str`"),
        ("aten.mm.default float32 4x6 6x8 out=__import__('os')", "malformed"),
    ],
)
def test_what_is_no_problem_is_an_error_that_names_the_line(line, reason):
    with pytest.raises(ArgumentError, match=rf"file:2: .*({reason})"):
        read("# first", line)


def test_the_benchmarks_problems_are_sixty():
    found = read(*BENCHMARK.read_text().splitlines())
    assert len({encode(p) for p in found}) == len(found) == 60

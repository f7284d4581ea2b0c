"""Small problems of an H200 in fp32 that no table knows, as a first call measures them."""

from ipex_inductor.lowerings.problem import shapes
from support.meta_device import H200

_WINDOW = "dilation=1,1 transposed=False output_padding=0,0 groups=1"
_CONV = "ipex.conv.default float32 {} {} " + _WINDOW + " {} unary='relu' scalars=() packed=''"
ALONE, ADD = "binary='none'", "binary='add'"
CONV = {
    "3x3": _CONV.format("4x12x7x9:L 16x12x3x3:L 16", "other=None stride=1,1 padding=1,1", ALONE),
    "3x3 add": _CONV.format("4x12x7x9:L 16x12x3x3:L 16 4x16x7x9:L", "stride=1,1 padding=1,1", ADD),
    "1x1": _CONV.format("4x12x7x9:L 16x12x1x1:L 16", "other=None stride=1,1 padding=0,0", ALONE),
    "1x1 add": _CONV.format("4x12x7x9:L 16x12x1x1:L 16 4x16x7x9:L", "stride=1,1 padding=0,0", ADD),
}
LINEAR = (
    "ipex.linear.default float32 52x12 16x12 16 other=None binary='none' unary='relu' "
    "scalars=() packed=False"
)


def problem(line):
    (found,) = shapes.problems([line], H200, {})
    return found

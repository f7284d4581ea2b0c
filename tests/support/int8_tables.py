"""Tables of problems of the int8 kernels: each line reaches other code, or ends elsewhere."""

from typing import Any

import torch
from torch import Tensor

from support.int8_ops import BF16, F32, S8, U8, Case, as_images, random_integers

__all__ = ["CASES", "EPILOGUES", "POOLS", "as_images", "compute_pool", "random_integers"]

ONE = (1, 1), (0, 0), (1, 1), 1  # stride, padding, dilation, groups
SAME = (1, 1), (1, 1), (1, 1), 1
VOLUME = (1, 1, 1), (1, 1, 1), (1, 1, 1), 1


def _window(stride: Any = 1, padding: Any = 1, dilation: Any = 1, groups: int = 1) -> Any:
    both = ((v, v) if isinstance(v, int) else v for v in (stride, padding, dilation))
    return (*both, groups)


CONVOLUTIONS = [
    # One pixel: rows lie in the activation, whose channels may be none of four, 64 or 16.
    Case((2, 64, 7, 8), (48, 64, 1, 1), ONE, unary="relu"),
    Case((1, 128, 6, 8), (40, 128, 1, 1), ONE, S8, S8),
    Case((1, 36, 5, 5), (33, 36, 1, 1), ONE, dtype=F32),
    Case((1, 7, 5, 5), (17, 7, 1, 1), ONE, dtype=BF16),
    Case((1, 64, 9, 9), (70, 64, 1, 1), _window(2, 0)),
    Case((1, 16, 4, 4), (16, 16, 1, 1), _window(1, 1), S8, unary="relu"),  # a border of padding
    # Three pixels, with all that moves them.
    Case((2, 64, 7, 7), (64, 64, 3, 3), SAME),
    Case((1, 20, 9, 7), (130, 20, 3, 3), _window((2, 1), (0, 2), (1, 2)), S8, S8),
    Case((1, 5, 8, 11), (9, 5, 3, 2), _window((1, 2), (2, 0), (2, 1)), dtype=F32),
    Case((3, 16, 3, 3), (20, 16, 3, 3), _window(1, 0)),  # one pixel of output
    Case((1, 8, 2, 2), (16, 8, 5, 5), _window(1, 4)),  # the window is larger than the image
    Case((2, 3, 31, 33), (64, 3, 7, 7), _window(2, 3), unary="relu"),
    Case((1, 3, 20, 21), (33, 3, 7, 5), _window((2, 3), (3, 1)), S8, BF16),
    Case((1, 1, 6, 40), (4, 1, 1, 9), _window(1, (0, 4)), dtype=S8),
    # Groups.
    Case((1, 32, 9, 7), (64, 4, 3, 3), _window(groups=8), unary="hardtanh", scalars=(0.0, 6.0)),
    Case((1, 32, 9, 7), (40, 4, 3, 3), _window(groups=8), S8, F32),
    Case((2, 128, 4, 4), (34, 64, 1, 1), _window(1, 0, groups=2), U8, S8),
    # One channel a group, with one or two results each.
    Case((2, 32, 9, 7), (32, 1, 3, 3), _window(groups=32), unary="hardtanh", scalars=(0.0, 6.0)),
    Case((1, 33, 9, 7), (66, 1, 5, 5), _window(2, 2, groups=33), S8, S8),
    Case((1, 5, 9, 7), (5, 1, 3, 3), _window(1, (2, 0), (2, 1), groups=5), S8, F32),
    Case((1, 18, 6, 6), (36, 1, 3, 3), _window(groups=18), dtype=BF16, unary="silu"),
    Case((1, 19, 7, 7), (19, 1, 7, 7), _window(1, 3, groups=19)),
    # Three dimensions.
    Case((1, 16, 5, 9, 7), (33, 16, 3, 3, 3), ((1, 2, 1), (1, 0, 1), (1, 1, 1), 1)),
    Case((1, 64, 2, 3, 4), (16, 64, 1, 1, 1), ((1, 1, 1), (0, 0, 0), (1, 1, 1), 1), dtype=F32),
    Case((1, 20, 4, 5, 6), (20, 1, 3, 3, 3), (*VOLUME[:3], 20), S8, S8),
    Case((1, 6, 4, 5, 6), (8, 3, 2, 3, 1), ((2, 1, 1), (1, 1, 0), (1, 2, 1), 2), S8),
    # More rows than a block, and none.
    Case((1, 32, 30, 21), (24, 32, 3, 3), SAME),
    Case((0, 16, 5, 5), (8, 16, 3, 3), SAME),
    Case((0, 16, 5, 5), (16, 1, 3, 3), _window(groups=16)),
]
ROWS = (1, 3, 5, 17, 31, 200)
DEPTHS = ((64, 64), (96, 70), (50, 33), (7, 5), (256, 16), (1, 1))
LINEARS = [
    *(Case((rows, depth), (n, depth)) for rows in ROWS for depth, n in DEPTHS),
    *(Case((rows, 66), (47, 66), (), S8, S8) for rows in ROWS),
    Case((2, 3, 768), (130, 768), dtype=F32, unary="gelu"),
    Case((300,), (40, 300), dtype=BF16),
    Case((0, 30), (40, 30)),
    Case((64, 512), (256, 512), unary="gelu_tanh"),  # several parts where threads are many
]
ADDENDS = [
    Case((1, 24, 5, 7), (40, 24, 3, 3), SAME, x, dtype, other, "add", unary)
    for x, dtype, other, unary in [
        *((U8, U8, other, "relu") for other in (U8, S8, F32, BF16)),
        *((S8, S8, other, "none") for other in (U8, S8, F32, BF16)),
        *((U8, dtype, other, "none") for dtype in (F32, BF16) for other in (U8, S8, F32, BF16)),
        (U8, U8, U8, "sigmoid"),
    ]
]
ADDENDS += [
    Case((1, 24, 5, 7), (24, 1, 3, 3), _window(groups=24), U8, dtype, other, "add", "relu")
    for dtype, other in ((U8, U8), (S8, S8), (F32, F32), (BF16, BF16))
]
ADDENDS += [
    Case((5, 40), (19, 40), (), U8, dtype, other, binary)
    for binary in ("add", "mul", "sub")
    for dtype, other in ((U8, U8), (F32, F32), (BF16, BF16))
]
SCALARS = {"elu": (0.7,), "leaky_relu": (0.1,), "hardtanh": (-1.0, 2.5)}
# Of roots all values are positive, of exponentials most are less than the largest integer.
BIAS = {"sqrt": 30.0, "exp": -1.0}


def _epilogue(unary: str, dtype: torch.dtype, other: bool) -> Case:
    words = ("add", unary, SCALARS.get(unary, ()), BIAS.get(unary, 0.0), 1.0)
    if not other:
        words = ("none", *words[1:])
    return Case((9, 40), (35, 40), (), U8, dtype, dtype if other else None, *words)


UNARIES = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "abs", "elu", "exp")
UNARIES += ("hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "sqrt", "square")
EPILOGUES = [
    _epilogue(unary, dtype, other)
    for unary in UNARIES
    for dtype in (U8, S8, F32, BF16)
    for other in (False, True)
]
BY_ROW = [
    Case(shape, (n, shape[-1]), (), S8, dtype, other, binary, unary, by_row=True)
    for shape, n in (((1, 64), 33), ((5, 7, 50), 70), ((100, 128), 48))
    for dtype, other, binary, unary in (
        (F32, None, "none", "none"),
        (BF16, BF16, "add", "none"),
        (F32, F32, "mul", "silu"),
        (U8, None, "none", "gelu"),
    )
]
CASES = [*CONVOLUTIONS, *LINEARS, *ADDENDS, *BY_ROW]
# Shapes of x, and window, stride, padding, dilation, ceil mode.
POOLS = [
    ((2, 64, 9, 8), ((3, 3), (2, 2), (1, 1), (1, 1), False)),
    ((1, 5, 9, 8), ((3, 2), (2, 3), (1, 0), (1, 2), True)),
    ((1, 33, 4, 4), ((2, 2), (2, 2), (0, 0), (1, 1), False)),
    ((0, 8, 4, 4), ((2, 2), (2, 2), (0, 0), (1, 1), False)),
]


def compute_pool(x: Tensor, words: tuple[Any, ...]) -> Tensor:
    """Return the result of the op, by its reference."""
    *lists, ceil_mode = words
    return torch.ops.ipex.int8_max_pool(x, *map(list, lists), ceil_mode)

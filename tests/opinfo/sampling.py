"""The cases that run every time: a stated choice of what our passes touch, and a spread of the
rest.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterator

from opinfo import cases
from opinfo.cases import Case

SIZE = 150
# Graphs that the cases share, as g++ takes seconds for each whatever it holds.
TRAINED, OTHERS = 2, 5
# What our passes and kernels touch: each is used in one way of two, both dtypes in turn.
NAMED = (
    *("nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d"),
    *("nn.functional.conv_transpose1d", "nn.functional.conv_transpose2d", "nn.functional.bilinear"),
    *("nn.functional.linear", "mm", "addmm", "addmm.decomposed", "bmm", "baddbmm", "addbmm"),
    *(
        "matmul",
        "__rmatmul__",
        "mv",
        "addmv",
        "dot",
        "inner",
        "outer",
        "einsum",
        "linalg.multi_dot",
    ),
    *("nn.functional.layer_norm", "nn.functional.group_norm", "nn.functional.batch_norm"),
    *("nn.functional.instance_norm", "nn.functional.rms_norm", "nn.functional.normalize"),
    *("nn.functional.max_pool1d", "nn.functional.max_pool2d", "nn.functional.avg_pool2d"),
    *("nn.functional.adaptive_avg_pool2d", "nn.functional.scaled_dot_product_attention"),
    *("nn.functional.relu", "nn.functional.gelu", "nn.functional.silu", "nn.functional.elu"),
    *("nn.functional.hardswish", "nn.functional.mish", "nn.functional.glu", "nn.functional.prelu"),
    *("softmax", "log_softmax", "sigmoid", "tanh", "nn.functional.pad.constant", "cat", "stack"),
    *("nn.functional.interpolate.bilinear", "nn.functional.embedding", "nn.functional.unfold"),
    *("view", "transpose", "permute", "movedim", "expand", "unsqueeze", "select", "as_strided"),
    *("split", "diagonal", "clamp", "add", "mul", "where", "addcmul", "lerp", "index_add"),
    *("_foreach_add", "_foreach_mul", "_foreach_addcdiv", "_foreach_lerp", "_foreach_sqrt"),
    *("nn.Linear", "nn.Conv1d", "nn.Conv2d", "nn.BatchNorm2d", "nn.LayerNorm", "nn.Bilinear"),
    *("nn.MultiheadAttention", "nn.GRUCell", "nn.Embedding", "nn.MaxPool2d", "nn.GELU"),
)
# Of these a backward has some 130 ops, where most have under 30: only the forward is taken.
FORWARD = ("nn.functional.interpolate.bilinear", "_foreach_sqrt", "nn.GRUCell")
# Their samples are many or large, or have up to 330 ops, for which Inductor and g++ take long.
SLOW = ("linalg", "svd", "fft", "unique", "ctc", "lstm", "transformer", "quantile", "polygamma")
SLOW += ("grid_sample", "interpolate", "_foreach", "batch_norm")
SLOW += ("tensor_split",)  # indices in a tensor break the graph, which is compiled in parts then


@functools.cache
def sample() -> tuple[Case, ...]:
    """Return the same cases each time, few of which change with torch's lists."""
    every = [case for case in cases.every() if not cases.row_of(case, "both_wrong")]
    chosen = list(_named(every))
    rest = [case for case in every if case not in {*chosen} and _is_cheap(case)]
    rest.sort(key=lambda case: hashlib.sha256(str(case).encode()).digest())
    more = (case for case in rest if cases.samples(case))
    return (*chosen, *itertools.islice(more, SIZE - len(chosen)))


def part(number: int) -> tuple[Case, ...]:
    """Return the cases of one of the graphs, those that are trained first."""
    training = number < TRAINED
    alike = tuple(case for case in sample() if (case.way == "training") is training)
    return alike[number::TRAINED] if training else alike[number - TRAINED :: OTHERS]


def _named(every: list[Case]) -> Iterator[Case]:
    for number, name in enumerate(NAMED):
        same = [case for case in every if case.name == name]
        dtype = tuple(cases.DTYPES)[number % 2]
        trained = number % 4 == 0 and name not in FORWARD
        wanted = ("training", "inference") if trained else ("weights", "in place", "inference")
        fits = (c for way in wanted for c in same if (c.way, c.dtype) == (way, dtype))
        yield from itertools.islice((case for case in fits if cases.samples(case)), 1)


def _is_cheap(case: Case) -> bool:
    return case.way != "training" and not any(word in case.name.lower() for word in SLOW)

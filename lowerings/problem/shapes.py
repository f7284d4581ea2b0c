"""Parser of handwritten problems: `OP DTYPE SHAPE... [NAME=VALUE...] [-> EPILOGUE]` in a line.

    aten.mm.default bfloat16 512x768 768x3072:T -> aten.relu.default(y)
    aten.convolution.default float32 8x64x56x56:L 64x64x3x3:L bias=None stride=1,1 padding=1,1 \
dilation=1,1 transposed=False output_padding=0,0 groups=1

Operands are contiguous. `:T` marks one whose last two dimensions are transposed in memory, `:L` one
in channels-last. `NAME=N` gives the length of a list of tensors. The epilogue's operands follow the
op's. A line may also be a problem in JSON, as in records.
"""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator

import msgspec

from ipex_inductor.autotune.record import Constant, Operand, Problem
from ipex_inductor.errors import ArgumentError
from ipex_inductor.lowerings.problem.node_problem import by_one_layout
from ipex_inductor.lowerings.problem.settings import relevant_settings
from ipex_inductor.lowerings.problem.workload import check

_OPERAND = re.compile(r"(\d+(?:x\d+)*)(?::([TL]))?")
_FORM = "OP DTYPE SHAPE... [NAME=VALUE...] [-> EPILOGUE], or a problem as JSON"


def problems(
    lines: Iterable[str], arch: str, settings: dict[str, Constant], source: str = "line"
) -> Iterator[Problem]:
    """Yield the problem of each line that is neither empty nor a comment (`#`).

    Args:
        lines: lines of text.
        arch: architecture of the problems.
        settings: settings of this device; a problem holds the ones that affect its op.
        source: name of the file or the option, for errors.

    Raises:
        ArgumentError: a line is no problem, or the op cannot be called like that.
    """
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                yield check(_problem(text, arch, settings))
            except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
                received = f"{source}:{number}: {text[:200]!r} ({str(error).splitlines()[0][:300]})"
                raise ArgumentError(_FORM, received, "Mend the line.") from None


def _problem(text: str, arch: str, settings: dict[str, Constant]) -> Problem:
    if text.startswith("{"):
        read = msgspec.json.decode(text, type=Problem)
        relevant = relevant_settings(
            read.settings, read.op, {operand.dtype for operand in read.operands}
        )
        operands = by_one_layout(read.op, read.operands)
        return msgspec.structs.replace(read, operands=operands, settings=relevant)
    head, _, epilogue = text.partition("->")
    op, dtype, *tokens = head.split()
    operands = tuple(_operand(token, dtype) for token in tokens if "=" not in token)
    constants = dict(_constant(token) for token in tokens if "=" in token)
    relevant = relevant_settings(settings, op, {operand.dtype for operand in operands})
    laid_out = by_one_layout(op, operands)
    return Problem(op, laid_out, arch, constants, epilogue.strip(), settings=relevant)


def _operand(token: str, dtype: str) -> Operand:
    match = _OPERAND.fullmatch(token)
    if match is None:
        raise ValueError(f"{token!r} is no shape like 64x128, 64x128:T or 8x3x224x224:L")
    shape = tuple(map(int, match[1].split("x")))
    order = [*range(len(shape))]
    if match[2]:
        if len(shape) < 2:
            raise ValueError(f"{token!r} has no dimensions to move")
        moved = 1 if match[2] == "L" else len(shape) - 2
        order.append(order.pop(moved))
    inner = [shape[i] for i in order]
    steps = list(itertools.accumulate([*inner[:0:-1]], lambda a, b: a * b, initial=1))[::-1]
    stride = [0] * len(shape)
    for dimension, step in zip(order, steps, strict=True):
        stride[dimension] = step
    return Operand(shape, tuple(stride), dtype)


def _constant(token: str) -> tuple[str, Constant]:
    name, _, text = token.partition("=")
    if text.startswith("torch."):
        return name, text
    value = ast.literal_eval(text)
    return name, value

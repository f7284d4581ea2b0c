"""Problems written by hand: a line each, `OP DTYPE SHAPE... [NAME=VALUE...] [-> EPILOGUE]`.

    aten.mm.default bfloat16 512x768 768x3072:T -> aten.relu.default(y)
    aten.convolution.default float32 8x64x56x56:L 64x64x3x3:L bias=None stride=1,1 padding=1,1 \
dilation=1,1 transposed=False output_padding=0,0 groups=1

Operands are contiguous; `:T` has its last two dimensions transposed in memory, `:L` its channels
last. Of a list of tensors `NAME=N` says the length. The epilogue's own operands come behind those
of the op. A problem in JSON, as records hold it, is a line as well.
"""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator

import msgspec

from ipex_inductor.autotune.record import Constant, Operand, Problem
from ipex_inductor.errors import ArgumentError
from ipex_inductor.lowerings.problem.settings import obeyed
from ipex_inductor.lowerings.problem.workload import by_one_layout, check

_OPERAND = re.compile(r"(\d+(?:x\d+)*)(?::([TL]))?")
_FORM = "OP DTYPE SHAPE... [NAME=VALUE...] [-> EPILOGUE], or a problem as JSON"


def problems(
    lines: Iterable[str], arch: str, settings: dict[str, Constant], source: str = "line"
) -> Iterator[Problem]:
    """The problem of each line that is neither empty nor a comment (`#`).

    Raises `ArgumentError` that names the line, for what is no problem or no call of its op.
    """
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                yield check(_problem(text, arch, settings))
            except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
                came = f"{source}:{number}: {text[:200]!r} ({str(error).splitlines()[0][:300]})"
                raise ArgumentError(_FORM, came, "Mend the line.") from None


def _problem(text: str, arch: str, settings: dict[str, Constant]) -> Problem:
    if text.startswith("{"):
        read = msgspec.json.decode(text, type=Problem)
        given = obeyed(read.settings, read.op, {operand.dtype for operand in read.operands})
        operands = by_one_layout(read.op, read.operands)
        return msgspec.structs.replace(read, operands=operands, settings=given)
    head, _, epilogue = text.partition("->")
    op, dtype, *words = head.split()
    operands = tuple(_operand(word, dtype) for word in words if "=" not in word)
    constants = dict(_constant(word) for word in words if "=" in word)
    given = obeyed(settings, op, {operand.dtype for operand in operands})
    known = by_one_layout(op, operands)
    return Problem(op, known, arch, constants, epilogue.strip(), settings=given)


def _operand(word: str, dtype: str) -> Operand:
    found = _OPERAND.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} is no shape like 64x128, 64x128:T or 8x3x224x224:L")
    shape = tuple(map(int, found[1].split("x")))
    order = [*range(len(shape))]
    if found[2]:
        if len(shape) < 2:
            raise ValueError(f"{word!r} has no dimensions to move")
        moved = 1 if found[2] == "L" else len(shape) - 2
        order.append(order.pop(moved))
    inner = [shape[i] for i in order]
    steps = list(itertools.accumulate([*inner[:0:-1]], lambda a, b: a * b, initial=1))[::-1]
    stride = [0] * len(shape)
    for dimension, step in zip(order, steps, strict=True):
        stride[dimension] = step
    return Operand(shape, tuple(stride), dtype)


def _constant(word: str) -> tuple[str, Constant]:
    name, _, text = word.partition("=")
    if text.startswith("torch."):
        return name, text
    value = ast.literal_eval(text)
    return name, value

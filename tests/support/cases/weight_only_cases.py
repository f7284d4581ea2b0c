"""Problems of linear layers on quantized weights."""

from ipex_inductor.autotune.record import Operand, Problem
from support.autotune.shipped_tables import H200

STORED = {"int4": "uint8", "nf4": "uint8", "int8": "int8", "fp8": "float8_e4m3fn"}
ZEROS = {"int4": "uint8", "int8": "int8"}


def weight_only_problem(
    rows,
    columns,
    depth,
    weight_dtype="int4",
    group=128,
    zeroed=True,
    dtype="bfloat16",
    compute=None,
    arch=str(H200),
):
    """Return the problem of x [rows, depth] and a weight [columns, depth], with a bias."""

    def operand(*shape, of):
        steps = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            steps[i - 1] = steps[i] * shape[i]
        return Operand(shape, tuple(steps), of)

    width = depth // 2 if STORED[weight_dtype] == "uint8" else depth
    groups = -(-depth // group)
    operands = [operand(rows, depth, of=dtype), operand(columns, width, of=STORED[weight_dtype])]
    operands.append(operand(columns, groups, of="float16"))
    operands += [operand(columns, groups, of=ZEROS[weight_dtype])] if zeroed else []
    operands.append(operand(columns, of=dtype))
    constants = {} if zeroed else {"zeros": None}
    constants |= {"order": None, "weight_dtype": weight_dtype, "group_size": group}
    constants["compute"] = compute or dtype
    return Problem("ipex.weight_only_linear.default", tuple(operands), arch, constants)

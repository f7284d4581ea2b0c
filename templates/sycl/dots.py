"""The inner loop of GEMMs on pairs of bf16, in the assembly of CPUs with AVX-512 bf16."""

from ipex_inductor.ops.conv.sycl import COLUMNS, WORD
from ipex_inductor.templates.sycl.tiles import Tile

VECTOR = 64  # bytes
REGISTERS = 32
ROWS, WEIGHT, PAIRS, SUMS = "%0", "%1", "%2", "%3"  # operands, in the order of `dots.cpp`


def add_up(tile: Tile) -> str:
    """Return the macro `ADD_UP`, that loop for a tile, and `CHANGED`, the registers it writes.

    The loop adds to SUMS [MT, NT vectors] the products of PAIRS pairs of each row and of the
    weight's panel: ROWS are STEP elements apart, and the panel's pairs COLUMNS words.
    """
    rows, vectors = range(tile.MT), range(tile.NT)
    keys = [(i, j) for i in rows for j in vectors]
    total = {key: f"%%zmm{n}" for n, key in enumerate(keys)}
    operand = {key: f"{n * VECTOR}({SUMS})" for n, key in enumerate(keys)}
    factor = [f"%%zmm{len(keys) + j}" for j in vectors]
    pair = f"%%zmm{len(keys) + tile.NT}"
    assert len(keys) + tile.NT < REGISTERS
    lines = [f"vmovups {operand[key]}, {total[key]}" for key in keys]
    lines.append("1:")
    lines += [f"vmovups {j * VECTOR}({WEIGHT}), {factor[j]}" for j in vectors]
    for i in rows:
        lines.append(f"vpbroadcastd {i * tile.STEP * WORD // 2}({ROWS}), {pair}")
        lines += [f"vdpbf16ps {factor[j]}, {pair}, {total[i, j]}" for j in vectors]
    lines += [f"add ${WORD}, {ROWS}", f"add ${COLUMNS * WORD}, {WEIGHT}"]
    lines += [f"dec {PAIRS}", "jnz 1b"]
    lines += [f"vmovups {total[key]}, {operand[key]}" for key in keys]
    text = "\\n".join(lines)
    registers = ", ".join(f'"zmm{n}"' for n in range(REGISTERS))
    return f'#define ADD_UP "{text}"\n#define CHANGED {registers}\n'

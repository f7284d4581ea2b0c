"""The loop that adds up products of pairs of bf16, in the assembly of CPUs with AVX-512 bf16."""

from ipex_inductor.ops.sycl import COLUMNS, WORD
from ipex_inductor.templates.sycl.tiles import Tile

VECTOR = 64  # bytes
REGISTERS = 32


def add_up(tile: Tile) -> str:
    """The macro `ADD_UP(sums, rows, weight, pairs)` of a tile of `dots`, for `dots.cpp`.

    It adds to sums [MT, NT vectors] what so many pairs of each row and of the weight's panel make;
    rows are STEP numbers apart, and so many pairs of the panel, a line of COLUMNS words each.
    """
    rows, vectors = range(tile.MT), range(tile.NT)
    total = {(i, j): f"%%zmm{i * tile.NT + j}" for i in rows for j in vectors}
    factor, pair = ([f"%%zmm{len(total) + n}" for n in at] for at in (vectors, [tile.NT]))
    assert len(total) + tile.NT < REGISTERS
    place = {key: f"{n * VECTOR}(%[sums])" for n, key in enumerate(total)}
    lines = [f"vmovups {place[key]}, {total[key]}" for key in total]
    lines.append("1:")
    lines += [f"vmovups {j * VECTOR}(%[weight]), {factor[j]}" for j in vectors]
    for i in rows:
        lines.append(f"vpbroadcastd {i * tile.STEP * 2}(%[rows]), {pair[0]}")
        lines += [f"vdpbf16ps {factor[j]}, {pair[0]}, {total[i, j]}" for j in vectors]
    lines += [f"add ${WORD}, %[rows]", f"add ${COLUMNS * WORD}, %[weight]", "dec %[pairs]", "jnz 1b"]
    lines += [f"vmovups {total[key]}, {place[key]}" for key in total]
    text = "\\n".join(lines)
    changed = ", ".join(f'"zmm{n}"' for n in range(REGISTERS))
    given = ", ".join(f'[{name}] "+r"({name})' for name in ("rows", "weight", "pairs"))
    return (
        "#define ADD_UP(sums, rows, weight, pairs) \\\n"
        f'  asm volatile("{text}" \\\n'
        f'               : {given} : [sums] "r"(sums) : "memory", "cc", {changed})\n'
    )

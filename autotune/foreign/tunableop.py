"""Import of results of torch's TunableOp: one line a GEMM, with its fastest solution.

Names and sizes follow TunableGemm.h and GemmCommon.h (torch/include/ATen/cuda/tunable). They are
BLAS's, column-major, so m and n, and a and b, are swapped relative to torch's. Torch 2.15 may write
`*` for a dynamic size: such lines belong to no one problem and are refused.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from ipex_inductor.autotune.foreign.told import UNKNOWN, Parsed, Told, microseconds
from ipex_inductor.autotune.record import (
    Choice,
    Constant,
    Operand,
    Outcome,
    Problem,
    Provenance,
    Record,
)
from ipex_inductor.errors import ArgumentError

_GEMM = re.compile(r"(Gemm|GemmAndBias|GemmStridedBatched)TunableOp_(.+)_([NT])([NT])")
_SIZES = re.compile(
    r"[nt]{2}_(?P<m>\d{1,15})_(?P<n>\d{1,15})_(?P<k>\d{1,15})(_B_(?P<batch>\d{1,15}))?"
    r"(_ld_(?P<lda>\d{1,15})_(?P<ldb>\d{1,15})_\d{1,15})?(_compute_bf16x9_r)?"
)
_OPS = {"Gemm": "aten.mm", "GemmAndBias": "aten.addmm", "GemmStridedBatched": "aten.bmm"}
_PRECISIONS: dict[str, dict[str, Constant]] = {
    "tf32": {"precision": "tf32"},
    "bfx9": {"precision": "bf16x9"},
}
_DTYPES = {
    "float": "float32",
    "tf32": "float32",
    "bfx9": "float32",
    "double": "float64",
    "BFloat16": "bfloat16",
    "Half": "float16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}


def tunableop(path: Path, hints: Told, date: str) -> Parsed:
    """Yield a record of each line; raise `ArgumentError` for another kind of file."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [line.split(",", 4) for line in lines]
    validators = _validators(path, rows)
    arch = hints.arch or validators.get("GCN_ARCH_NAME", "").partition(":")[0]
    if not arch:
        raise ArgumentError("an architecture", f"none in {path}", "Say it: --arch sm_90.")
    tools = (f"{k} {v}" for k, v in validators.items() if k not in {"PT_VERSION", "GCN_ARCH_NAME"})
    by = Provenance(
        date,
        hints.device or UNKNOWN,
        validators["PT_VERSION"],
        UNKNOWN,
        toolkit=", ".join(tools),
        source="tunableop",
    )
    for number, row in enumerate(rows, 1):
        if row[0] != "Validator" and row != [""]:
            yield number, _row(row, arch, by)


def _validators(path: Path, rows: Iterable[list[str]]) -> dict[str, str]:
    """Return the versions that the file states; raise `ArgumentError` if they differ or lack."""
    versions: dict[str, str] = {}
    for row in rows:
        if row[0] == "Validator" and len(row) > 2:
            name, value = row[1], ",".join(row[2:])
            if versions.setdefault(name, value) != value:
                conflict = f"{name} {versions[name]} and {value} in {path}"
                raise ArgumentError(
                    "results of one machine", conflict, "Import each file by itself."
                )
    if "PT_VERSION" not in versions:
        advice = "TunableOp writes it as its first lines."
        raise ArgumentError("a line Validator,PT_VERSION,...", f"{path} without one", advice)
    return versions


def _row(row: list[str], arch: str, by: Provenance) -> Record | str:
    """Return the record of a line, or the reason why it is refused."""
    if len(row) < 4:
        return "it has no operator, sizes, solution and time"
    name, sizes = _GEMM.fullmatch(row[0]), _SIZES.fullmatch(row[1])
    if name is None or name[2] not in _DTYPES or sizes is None:
        return f"{row[0]},{row[1]} is no product that is read here"
    if (sizes["batch"] is not None) != (name[1] == "GemmStridedBatched"):
        return f"{row[0]} does not go with the sizes {row[1]}"
    time = microseconds(row[3])
    if time is None:
        return f"its time is {row[3]!r}"
    op, solution = _OPS[name[1]], row[2]
    is_default = solution == "Default"  # torch's call without TunableOp
    choice = Choice(
        "library", op if is_default else "tunableop", {} if is_default else {"solution": solution}
    )
    operands = _gemm_operands(name, {key: int(n) for key, n in sizes.groupdict().items() if n})
    problem = Problem(f"{op}.default", operands, arch, _PRECISIONS.get(name[2], {}))
    return Record(problem, (Outcome(choice, reported=time),), by)


def _gemm_operands(name: re.Match[str], sizes: dict[str, int]) -> tuple[Operand, ...]:
    """Return the operands of a GEMM.

    Alpha, beta, activation and batch strides are not in the file; torch's defaults are assumed.
    """
    dtype, (m, n, k) = _DTYPES[name[2]], (sizes[size] for size in "mnk")
    batch = (sizes["batch"],) if "batch" in sizes else ()
    matrices = (
        _matrix(batch, n, k, sizes.get("ldb"), name[4] == "T", dtype),
        _matrix(batch, k, m, sizes.get("lda"), name[3] == "T", dtype),
    )
    bias = (Operand((m,), (1,), dtype),) if name[1] == "GemmAndBias" else ()
    return (*bias, *matrices)


def _matrix(
    batch: tuple[int, ...], rows: int, columns: int, leading: int | None, turned: bool, dtype: str
) -> Operand:
    """Return a matrix operand.

    Args:
        batch: the batch size, or empty.
        rows: rows of the matrix.
        columns: columns of the matrix.
        leading: elements between its rows, or between its columns if `turned`; None if dense.
        turned: whether it is column-major.
        dtype: torch's name of the dtype.
    """
    inner, outer = (rows, columns) if turned else (columns, rows)
    leading = leading or inner
    stride = (1, leading) if turned else (leading, 1)
    return Operand((*batch, rows, columns), (*(outer * leading for _ in batch), *stride), dtype)

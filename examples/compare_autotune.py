"""Compare two autotune databases: which kernels changed, by how much, and is it more than noise.

    python examples/compare_autotune.py [--quick] [--html report.html]

Measures the batched matrix products of attention twice, into two databases. A real comparison has
databases of two versions of a driver or of torch. Then `ipex-inductor autotune compare` prints a
table and writes one page with plots (`pip install "ipex-inductor[report]"`).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

# One problem a line: op, dtype, sizes of the operands, and what follows in the same kernel.
SCORES = "aten.bmm.default float32 12x{}x64 12x64x{} -> aten.mul.Tensor(y, 0.125)"
IPEX_INDUCTOR = (sys.executable, "-m", "ipex_inductor")
OUTCOMES = {0: "nothing is worse", 1: "something is slower, or no longer runs", 2: "not comparable"}


def measure(shapes: Path, database: Path, seconds: float) -> None:
    """Measure each problem of the file into a new database, a folder."""
    command = (*IPEX_INDUCTOR, "autotune", "run", "--shapes", str(shapes))
    options = ("--into", str(database), "--again", "--budget", str(seconds))
    subprocess.run((*command, *options), check=True)


def main() -> None:
    """Measure twice, compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small problem")
    parser.add_argument("--html", type=Path, default=Path("report.html"), help="page to write")
    args = parser.parse_args()
    lengths = [16] if args.quick else [64, 128, 256]
    with tempfile.TemporaryDirectory() as folder:
        shapes = Path(folder, "shapes.txt")
        shapes.write_text("".join(SCORES.format(n, n) + "\n" for n in lengths))
        databases = [Path(folder, name) for name in ("before", "after")]
        for database in databases:
            database.mkdir()
            measure(shapes, database, 60 if args.quick else 600)
        command = (*IPEX_INDUCTOR, "autotune", "compare", *map(str, databases))
        done = subprocess.run((*command, "--html", str(args.html)), check=False)
    print(f"exit code {done.returncode}: {OUTCOMES.get(done.returncode, 'failed')}")
    print(f"page: {args.html} ({args.html.stat().st_size // 1024} KiB)")
    if done.returncode > 1:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()

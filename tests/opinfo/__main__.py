"""`python -m opinfo --shard 3/8 --results rows.jsonl`: run a share of all cases, and go on where it
stopped.

One JSON line is appended for each case, and cases that have one are skipped, so the same command
resumes a run. The cases run in a process of their own, which is started again if it dies.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

DEFAULTS = {
    # Passes must run each time, so graphs are not cached; compiled C++ is.
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/ipex_opinfo_{os.getuid()}",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "IPEX_PROGRESS": "0",
}


def main() -> int:
    """Run the cases; return 1 if any is wrong."""
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the process of the cases ends too
    os.environ.update({name: os.environ.get(name, value) for name, value in DEFAULTS.items()})
    with tempfile.TemporaryDirectory(prefix="ipex_home_") as home:
        os.environ["IPEX_HOME"] = home
        from opinfo import cases, runner, sampling

        number, count = map(int, args.shard.split("/"))
        every = sampling.sample() if args.sample else cases.every()
        chosen = [
            case
            for case in every[number - 1 :: count]
            if re.search(args.only, str(case)) and case.way in args.ways.split(",")
        ]
        done = read(args.results)
        todo = [case for case in chosen if str(case) not in done]
        with args.results.open("a") as file:
            for row in runner.rows(todo, args.group, args.as_is, args.timeout):
                file.write(json.dumps(row) + "\n")
                file.flush()
                if row["status"] not in ("pass", "skip", "listed"):
                    print(f"{row['status']}: {row['case']}: {row['reason']}", flush=True)
    done = read(args.results)
    tally = Counter(done[str(case)]["status"] for case in chosen if str(case) in done)
    print(", ".join(f"{status}: {n}" for status, n in sorted(tally.items())))
    return int(bool(tally.keys() - {"pass", "skip", "listed"}))


def read(path: Path) -> dict[str, dict]:
    """Return the rows of a results file by case, the last one of each."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["case"]: row for row in map(json.loads, lines)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="opinfo", description=__doc__)
    parser.add_argument("--shard", default="1/1", help="which share: 3/8 is the third of eight")
    parser.add_argument("--results", type=Path, default=Path("opinfo.jsonl"), help="a file of rows")
    parser.add_argument("--sample", action="store_true", help="of the cases that run every time")
    parser.add_argument("--only", default="", help="a regular expression of names of cases")
    ways = "inference,weights,in place,training"
    parser.add_argument("--ways", default=ways, help="comma-separated, of these")
    group = "how many cases share a graph in inference; in training a third as many"
    parser.add_argument("--group", type=int, default=72, help=group)
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one group")
    parser.add_argument(
        "--as-is", action="store_true", help="run graphs as our passes leave them, uncompiled"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Compare inference on a CPU: backend `ipex`, Inductor's best mode, IPEX 2.8 and eager.

    python -m benchmarks cpu [--peers inductor,ipex28,eager] [--rows WORDS] [--ipex28 FOLDER]
        [--threads N] [--clock wall|cpu] [--seconds S] [--cache FOLDER] [--json FILE]

Each peer of a row runs in a process of its own (`common/cpu_peer.py`), IPEX 2.8 in an environment
with its own torch. All peers prepare one after the other and are checked against fp64. Then they
take turns of a few calls each, so that other load on the machine hits all of them: compare minima
and their ratios. Models named `...-nchw` are not channels-last; they run only if `--rows` names
them. On a busy machine `--threads 1 --clock cpu` compares processor time of one thread. A wrong
result gets no speed. `ipex28` stands for its trace and its compile mode; `ipex-package` is a
packaged model of `ipex`, which like a trace has no guards. Rows in int8 are quantized by each peer:
Inductor's by torchao's PT2E, which must be installed.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "common" / "cpu_peer.py"
RESULTS = Path(__file__).with_name("results") / "cpu.jsonl"
IPEX28 = ".venv-ipex28"
HOW = """IPEX 2.8 runs on torch 2.8 only. To make its environment (Python 3.11):
    python3.11 -m venv {folder}
    {folder}/bin/pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0 transformers==4.55.4"""
WAYS = {"ipex28": ("ipex28-trace", "ipex28-compile")}
ROWS = (
    ("resnet50", "bf16", 1),
    ("resnet50", "bf16", 16),
    ("resnet50", "fp32", 1),
    ("bert", "bf16", 1),
    ("bert", "bf16", 16),
    ("bert", "fp32", 1),
    ("bert", "fp32", 16),
    ("vit", "bf16", 1),
    ("gpt2-decode", "bf16", 1),
    ("resnet50", "int8", 1),
    ("resnet50", "int8", 16),
    ("bert", "int8", 1),
)
# Where users did not think of layouts; measured if `--rows` names them.
PLAIN = ("resnet18", "resnet50", "regnet", "mobilenet")
NAMED = tuple((f"{model}-nchw", dtype, 1) for dtype in ("fp32", "bf16") for model in PLAIN)
NO_OTHERS = ("ipex", "ipex-package", "eager")
CLOCKS = {"wall": "min_ms", "cpu": "min_cpu_ms"}
TURN = 0.3  # seconds of one turn, about
REST = 0.02  # between turns: threads that wait for work spin for some milliseconds


@dataclass
class Peer:
    """A process that is ready to run one model."""

    name: str
    process: "subprocess.Popen[str]"
    facts: dict[str, Any]
    times: list[list[float]] = field(default_factory=list)  # by the clock, of processors

    def turn(self, calls: int) -> list[list[float]]:
        """Milliseconds of so many calls."""
        return list(read_answer(self.process, str(calls)))


def read_answer(process: "subprocess.Popen[str]", line: str | None = None) -> Any:
    """What the process answers to `line`, or by itself. Raises RuntimeError when it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line is not None:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"ended with {process.wait()}")
    return json.loads(answer)


@contextmanager
def start_peer(
    name: str, row: tuple[str, str, int], options: argparse.Namespace, log: Path
) -> Iterator[Peer]:
    """The peer, prepared. Raises RuntimeError with the end of what it wrote."""
    python = f"{options.ipex28}/bin/python" if name.startswith("ipex28") else sys.executable
    folder = Path(options.cache) / name
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "IPEX_HOME": str(folder / "home")}
    if name.startswith("inductor"):  # ours keeps torch's files by itself
        env["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    command = [python, str(PROGRAM), name, *map(str, row)]
    with log.open("w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, env=env, text=True, **pipes)  # type: ignore[call-overload]
        try:
            yield Peer(name, process, read_answer(process))
        except RuntimeError as error:
            raise RuntimeError(f"{name} {error}: {log.read_text()[-600:]}") from error
        finally:
            process.kill()
            process.wait()


def time_in_turns(peers: Sequence[Peer], seconds: float) -> None:
    """Turns of all peers, one after the other and back, for at least so long."""
    calls = {peer.name: max(2, int(TURN * 1e3 / min(peer.turn(2))[0])) for peer in peers}
    end, order = time.monotonic() + seconds, list(peers)
    while time.monotonic() < end or len(order[0].times) < 3 * calls[order[0].name]:
        for peer in order:
            time.sleep(REST)
            peer.times += peer.turn(calls[peer.name])
        order.reverse()


def measure_row(row: tuple[str, str, int], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return minima and medians of each peer of one row, or why there are none."""
    with ExitStack() as stack:
        peers, logs = [], Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in options.names:
            try:
                peer = stack.enter_context(start_peer(name, row, options, logs / name))
            except RuntimeError as error:
                yield {"peer": name, "failed": str(error)}
                continue
            if not peer.facts["error"] <= peer.facts["limit"]:
                yield {"peer": name, **peer.facts, "failed": "wrong: no speed of it"}
                continue
            peers.append(peer)
        if peers:
            time_in_turns(peers, options.seconds)
        for peer in peers:
            yield {"peer": peer.name, **peer.facts, "calls": len(peer.times), **speed_of(peer)}


def speed_of(peer: Peer) -> dict[str, float]:
    """Return minima and medians in milliseconds."""
    clock, processors = zip(*peer.times, strict=True)
    return {
        "min_ms": round(min(clock), 3),
        "median_ms": round(statistics.median(clock), 3),
        "min_cpu_ms": round(min(processors), 3),
    }


def format_table(found: dict[tuple[str, str, int], dict[str, float]], names: Sequence[str]) -> str:
    """Minima of all peers, and how many times as fast as the best of the others we are.

    Eager and our own packages are none of the others.
    """
    lines = [f"{'':22}" + "".join(f"{name:>16}" for name in names) + f"{'best/ours':>12}"]
    ratios: dict[str, list[float]] = {}
    for (model, dtype, batch), minima in found.items():
        cells = [f"{minima[n]:16.2f}" if n in minima else f"{'-':>16}" for n in names]
        others = [ms for name, ms in minima.items() if name not in NO_OTHERS]
        ratio = min(others) / minima["ipex"] if others and "ipex" in minima else None
        if ratio is not None:
            ratios.setdefault(dtype, []).append(ratio)
        shown = f"{'-' if ratio is None else f'{ratio:.2f}':>12}"
        lines.append(f"{f'{model} {dtype} b{batch}':22}" + "".join(cells) + shown)
    for dtype, values in ratios.items():
        mean = math.exp(statistics.mean(map(math.log, values)))
        lines.append(f"geometric mean {dtype}: {mean:.3f}, least {min(values):.3f}")
    return "\n".join(lines)


def describe_run() -> dict[str, Any]:
    """Return date, CPU, commit and command of this run."""
    with open("/proc/cpuinfo") as info:
        name = next(line.partition(":")[2].strip() for line in info if line.startswith("model n"))
    root = Path(__file__).parent.parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": f"{name}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "-m", "benchmarks", "cpu", *sys.argv[1:]]),
    }


def main() -> None:
    """Measure the rows; ends with 1 if a peer of ours failed or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", default="inductor,ipex28,eager", help="beside ours")
    parser.add_argument("--rows", default="", help='as "resnet50 bf16,vit,regnet-nchw"')
    parser.add_argument("--ipex28", default=IPEX28, help="the environment of IPEX 2.8")
    parser.add_argument("--seconds", type=float, default=12, help="of timing a row, at least")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of the table")
    parser.add_argument("--cache", help="compiled graphs of all peers; empty if not named")
    parser.add_argument("--json", default=RESULTS, help="append the rows to this file")
    options = parser.parse_args()
    asked = [name for part in options.peers.split(",") for name in WAYS.get(part, (part,))]
    options.names = ["ipex", *filter(None, asked)]
    if "ipex28" in options.peers and not os.path.exists(f"{options.ipex28}/bin/python"):
        parser.error(HOW.format(folder=options.ipex28))
    wanted = [set(words.split()) for words in options.rows.split(",")]
    known, found, failed = describe_run(), {}, False
    with tempfile.TemporaryDirectory() as folder:
        options.cache = options.cache or folder
        for row in (*ROWS, *(NAMED if options.rows else ())):
            if not any(words <= {row[0], row[1], f"b{row[2]}"} for words in wanted):
                continue
            found[row] = minima = {}
            for facts in measure_row(row, options):
                facts = dict(zip(("model", "dtype", "batch"), row, strict=True)) | facts
                print(json.dumps(facts), flush=True)
                if "failed" in facts:
                    failed |= facts["peer"] == "ipex"
                else:
                    minima[facts["peer"]] = facts[CLOCKS[options.clock]]
                with open(options.json, "a") as file:
                    file.write(json.dumps({**facts, **known}) + "\n")
    print(format_table(found, options.names))
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""Compare decoding of language models: ours in bf16, int8 and int4, eager, Inductor, other engines.

    python -m benchmarks llm [--models tinyllama-1.1b ...] [--rows ours ours-int4-32 ...]
        [--batch 1 ...] [--beams N] [--prompt N] [--new N] [--turns N] [--device cpu|cuda]
        [--ipex28 FOLDER] [--llamacpp FOLDER] [--json FILE]

Random weights in published shapes, greedy search by `generate`. Each row is a process of its own,
so that peak memory is its own too. Its logits are checked first against the eager model in fp32: a
row that is farther off than one and a half times eager in bf16 is printed as wrong, without a
speed. On a CPU all rows of a model take turns, with the read bandwidth beside them: compare minima
and their ratios. On a GPU rows run one after the other and are printed as they come, with the copy
bandwidth measured behind each.

IPEX 2.8 and llama.cpp run in environments of their own, on the same weights. llama.cpp is built for
this machine, its error is the one of its own rounding of weights.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.command import command_line
from ipex_inductor.cli.llm.jobs import Child, ChildError, Job, start_child
from ipex_inductor.cli.llm.results import describe_error, summarize

COMMON = Path(__file__).parents[1] / "common"
HOW = """{peer} runs in an environment of its own. To make it (Python 3.11):
    python3.11 -m venv {folder}
    {install}"""
INSTALL = {
    "ipex28": "{folder}/bin/pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0"
    " transformers==4.51.3",
    "llamacpp": "CMAKE_ARGS=-DGGML_NATIVE=ON {folder}/bin/pip install"
    " --no-binary llama-cpp-python llama-cpp-python gguf",
}


@dataclass(frozen=True)
class Row:
    """A way to decode: a variant of the package's own bench, or the program of a peer."""

    variant: str
    settings: dict[str, Any] = field(default_factory=dict)
    peer: str = ""  # the environment it runs in


def _quantized(weights: str, group_size: int) -> Row:
    lowp = "INT8" if weights in ("int8", "int4") else "BF16"
    return Row("ours", {"weights": weights, "group_size": group_size, "lowp_mode": lowp})


ROWS = {
    "ours": Row("ours"),
    "ours-int8": _quantized("int8", -1),
    "ours-int4-32": _quantized("int4", 32),
    "ours-int4-128": _quantized("int4", 128),
    "ours-nf4-64": _quantized("nf4", 64),
    "ours-fp8": _quantized("fp8", -1),
    "eager": Row("eager"),
    "inductor": Row("inductor"),
    "reduce-overhead": Row("reduce-overhead"),
    "ipex28": Row("bf16", peer="ipex28"),
    "llamacpp-bf16": Row("bf16", peer="llamacpp"),
    "llamacpp-q8_0": Row("q8_0", peer="llamacpp"),
    "llamacpp-q4_0": Row("q4_0", peer="llamacpp"),
}
USUAL = {
    "cpu": ("ours", "ours-int8", "ours-int4-32", "ours-int4-128", "eager", "inductor"),
    "cuda": ("ours", "inductor", "reduce-overhead"),
}
MODELS = {"cpu": ("tinyllama-1.1b", "qwen2.5-0.5b"), "cuda": ("llama-8b",)}


class Session:
    """References and checkpoints that the rows of one run share, in one folder."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder

    def command(self, name: str, job: Job) -> list[str]:
        """Return the command of a row's process, once what it reads is written."""
        row = ROWS[name]
        job = replace(job, variant=row.variant, **row.settings)
        if job.weights and job.device != "cpu":  # GEMMs in int8 are for CPUs
            job = replace(job, lowp_mode="BF16")
        job = replace(job, reference=self._reference(job))
        if not row.peer:
            return job.command()
        python = Path(getattr(self.options, row.peer)) / "bin" / "python"
        program = COMMON / f"llm_{row.peer}.py"
        return [str(python), str(program), job.to_json(), self._checkpoint(job.model)]

    def _reference(self, job: Job) -> str:
        kind = f"{job.weights}{job.group_size}{job.lowp_mode}" if job.weights else job.dtype
        file = self.folder / f"{job.model}-{kind}-{job.batch}-{job.prompt}.npz".replace(":", "-")
        if not file.exists():
            work = replace(job, variant="reference", reference=str(file))
            with start_child(work.command(), self.folder / "reference.log"):
                pass
        return str(file)

    def _checkpoint(self, model: str) -> str:
        folder = self.folder / model.replace(":", "-")
        if not folder.exists():
            import torch

            from ipex_inductor.cli.llm.models import load_model

            load_model(model, torch.bfloat16, "cpu").save_pretrained(folder)
        return str(folder)


def run_group(session: Session, names: Sequence[str], job: Job) -> Iterator[dict[str, Any]]:
    """Yield the results of rows that take turns.

    Args:
        session: of the run.
        names: of rows; one at a time on a GPU.
        job: sizes and the model.
    """
    options, children = session.options, dict[str, Child]()
    environment = {"OMP_NUM_THREADS": str(options.threads)} if job.device == "cpu" else {}
    with ExitStack() as stack:

        def start(name: str, command: list[str]) -> Child:
            log = session.folder / f"{name}.log"
            return stack.enter_context(start_child(command, log, environment))

        for name in names:
            try:
                child = start(name, session.command(name, job))
            except ChildError as error:
                yield {"row": name, "failed": str(error)}
                continue
            if wrong := describe_error(child.facts):
                yield {"row": name, "failed": wrong, **child.facts}
                continue
            children[name] = child
        bandwidths = []
        if job.device == "cpu":  # a process of its own, so that peak memory has no buffer in it
            meter = start("bandwidth", replace(job, variant="bandwidth").command())
        for _ in range(options.turns):
            for child in children.values():
                child.take_turn()
            if job.device == "cpu":
                bandwidths.append(meter.measure_bandwidth())
        for name, child in children.items():
            bandwidth = max(bandwidths) if bandwidths else child.measure_bandwidth()
            yield {"row": name, **child.facts, **summarize(child, job, bandwidth)}


def describe_run(device: str) -> dict[str, Any]:
    """Return date, device, versions and command of this run."""
    if device == "cpu":
        with open("/proc/cpuinfo") as info:
            rows = (line.partition(":") for line in info)
            name = next(value.strip() for key, _, value in rows if key.strip() == "model name")
        name = f"{name}, {os.cpu_count()} cores"
    else:
        import torch

        name = torch.cuda.get_device_name()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": name,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "command": command_line(),
    }


def read_options() -> argparse.Namespace:
    """Return the options; ends with 2 for a peer whose environment is not there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=MODELS, default="cpu")
    parser.add_argument("--models", nargs="+", help="shapes, also as NAME:LAYERS")
    parser.add_argument("--rows", nargs="+", choices=ROWS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32, help="tokens of a generation")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--ipex28", default=".venv-ipex28", help="the environment of IPEX 2.8")
    parser.add_argument("--llamacpp", default=".venv-llamacpp", help="that of llama.cpp")
    parser.add_argument("--json", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    options.models = options.models or MODELS[options.device]
    options.rows = options.rows or USUAL[options.device]
    for peer in {ROWS[name].peer for name in options.rows} - {""}:
        folder = getattr(options, peer)
        if not (Path(folder) / "bin" / "python").exists():
            install = INSTALL[peer].format(folder=folder)
            parser.error(HOW.format(peer=peer, folder=folder, install=install))
    return options


def main() -> None:
    """Measure all rows; ends with 1 if one of ours failed or is wrong."""
    options = read_options()
    about, failed = describe_run(options.device), False
    with tempfile.TemporaryDirectory() as folder:
        session = Session(options, Path(folder))
        for model in options.models:
            for batch in options.batch:
                sizes = {"beams": options.beams, "prompt": options.prompt, "new": options.new}
                job = Job(model, "", batch=batch, device=options.device, **sizes)
                by_turns = options.device == "cpu"
                groups = [options.rows] if by_turns else [[name] for name in options.rows]
                for names in groups:
                    for facts in run_group(session, names, job):
                        failed |= "failed" in facts and facts["row"].startswith("ours")
                        print_row(
                            {"model": model, "batch": batch, **sizes, **facts}, about, options
                        )
    sys.exit(failed)


def print_row(row: dict[str, Any], about: dict[str, Any], options: argparse.Namespace) -> None:
    """Print a row; with --json append it to that file."""
    print(json.dumps(row), flush=True)
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps({**row, **about}) + "\n")


if __name__ == "__main__":
    main()

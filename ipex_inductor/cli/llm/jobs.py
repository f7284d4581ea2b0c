"""Jobs of `ipex-inductor llm bench`: a process for each variant, and what it answers.

A process prepares one variant and prints a JSON object with its facts. It then answers each line
that it reads with the times of one generation, so variants of several processes can take turns.
The module imports no torch: the command itself needs none.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

WARM_UP = 2  # generations before the first that is timed: the second one reuses caches
TURN, BANDWIDTH = "turn", "bandwidth"  # lines that a process answers


@dataclass(frozen=True)
class Job:
    """Work of one process.

    Args:
        model: a folder, or the name of a shape.
        variant: "ours", "eager", "inductor", "reduce-overhead", "reference" or "bandwidth".
        dtype: "bf16", "fp16" or "fp32".
        weights: "int8", "int4", "nf4" or "fp8" for quantized weights, "" for `dtype`.
        group_size: weights that share a scale, -1 for a row.
        lowp_mode: precision of GEMMs on quantized weights, a name of `WoqLowpMode`.
        batch: number of texts.
        beams: 1 for greedy search.
        prompt: tokens of each prompt.
        new: tokens that a generation adds.
        device: "cpu", "cuda" or "xpu".
        reference: file that the reference writes and the other variants read.
    """

    model: str
    variant: str
    dtype: str = "bf16"
    weights: str = ""
    group_size: int = -1
    lowp_mode: str = "NONE"
    batch: int = 1
    beams: int = 1
    prompt: int = 128
    new: int = 32
    device: str = "cpu"
    reference: str = ""

    def to_json(self) -> str:
        """Return the job as one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the job that `to_json` wrote."""
        return cls(**json.loads(text))

    def qconfig(self) -> Any:
        """Return the settings of the quantized weights.

        Raises:
            QuantizationError: for settings that do not go together.
        """
        from ipex_inductor.quantization.weight_only import QConfigWoq, WoqLowpMode, WoqWeightDtype

        kind, mode = WoqWeightDtype[self.weights.upper()], WoqLowpMode[self.lowp_mode]
        return QConfigWoq(kind, mode, group_size=self.group_size)

    def command(self) -> list[str]:
        """Return the command of the job's process."""
        return [sys.executable, "-m", "ipex_inductor.cli.llm.variant", self.to_json()]


class ChildError(Exception):
    """A process that ended without an answer, or answered with an error."""


@dataclass
class Child:
    """A process that prepared a variant, its facts, and the turns that it took."""

    process: "subprocess.Popen[str]"
    facts: dict[str, Any]
    turns: list[dict[str, Any]] = field(default_factory=list)

    def take_turn(self) -> dict[str, Any]:
        """Return the times of one more generation."""
        self.turns.append(read_answer(self.process, TURN))
        return self.turns[-1]

    def measure_bandwidth(self) -> float:
        """Return GB/s of the job's device, measured by the process."""
        return float(read_answer(self.process, BANDWIDTH)["gb_s"])


@contextmanager
def start_child(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """Start a process and yield it once it is ready; end it behind.

    Args:
        command: of the process.
        log: file for what it writes to stderr.
        environment: variables beside those of this process.

    Raises:
        ChildError: with the end of the log.
    """
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        yield Child(process, read_answer(process))
    except ChildError as error:
        raise ChildError(f"{error}\n{_end_of(log)}".rstrip()) from None
    finally:
        process.kill()
        process.wait()


def read_answer(process: "subprocess.Popen[str]", line: str | None = None) -> dict[str, Any]:
    """Return the object that the process answers to `line`, or prints by itself.

    Raises:
        ChildError: if it ended, or answers {"error": ...}.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    if line is not None:
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the exit code below says more
    answer = process.stdout.readline()
    if not answer:
        raise ChildError(f"the process ended with exit code {process.wait()}")
    facts: dict[str, Any] = json.loads(answer)
    if "error" in facts:
        raise ChildError(facts["error"])
    return facts


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-8:])

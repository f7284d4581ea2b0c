"""Substitutes for missing measurements: another torch's, another GPU's, or a similar problem's."""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ipex_inductor.autotune.pool import Pool, Samples
from ipex_inductor.autotune.record import Problem, encode
from ipex_inductor.autotune.space import of_this_torch

FILE = Path(__file__).with_name("derived.toml")
UNTIMED = "cudnn.benchmark"  # a common setting, without measurements of its own
COPY = re.compile(r"aten\.clone\.default\(y, memory_format='[\w.]+'\)")


def gpus() -> dict[str, str]:
    """Return the GPUs without measurements, and for each the GPU whose table it uses."""
    stand_ins: dict[str, str] = _read()["gpus"]
    return stand_ins


def may(problem: Problem) -> bool:
    """Return True if another torch's records count for it: an op of ours on an NVIDIA GPU."""
    return problem.op.startswith("ipex.") and problem.arch.startswith("sm_")


def list_equivalents(problem: Problem) -> list[tuple[str, Problem]]:
    """Return the problem and its equivalents, which serve if it has no records, with their labels.

    A convolution with `torch.backends.cudnn.benchmark` is treated as without it; fp16 is treated as
    bf16, which has the same size and, on these GPUs, the same GEMM throughput. A copy of the result
    to another layout is left out: as an epilogue it follows any choice.
    """
    variants = [("", problem)]
    if not may(problem):
        return variants
    if problem.settings == {UNTIMED: True}:
        variants.append((f" without {UNTIMED}", replace(problem, settings={})))
    if COPY.fullmatch(problem.epilogue):
        variants += [(f"{label} without a copy", replace(p, epilogue="")) for label, p in variants]
    if {operand.dtype for operand in problem.operands} == {"float16"}:
        bf16 = tuple(replace(operand, dtype="bfloat16") for operand in problem.operands)
        variants += [(f"{label} in bfloat16", replace(p, operands=bf16)) for label, p in variants]
    return variants


def take_over(of: Pool) -> str:
    """Adopt the samples of the newest torch that may stand in for this one; return its name.

    Failures under any such torch count too. Inductor's own templates are left out, because they
    belong to the torch that measured them. Returns "" if no such torch has timings.
    """
    from ipex_inductor import compat

    foreign: dict[str, list[Samples]] = {}
    adopted: dict[bytes, Samples] = {}
    for key, samples in of.samples.items():
        torch = samples.choice.template.partition(",")[0]
        if of_this_torch(samples.choice):
            adopted[key] = samples
        elif not samples.choice.name.startswith("inductor.") and _stands_in(torch):
            foreign.setdefault(torch, []).append(samples)
    timed_torches = [t for t, its_samples in foreign.items() if any(s.timings for s in its_samples)]
    newest = max(timed_torches, key=lambda t: [*map(int, re.findall(r"\d+", t))], default="")
    for torch, its_samples in foreign.items():
        for samples in its_samples:
            if torch == newest or samples.failed:
                _, comma, version = samples.choice.template.partition(",")
                choice = replace(samples.choice, template=compat.TEMPLATES + comma + version)
                adopted.setdefault(encode(choice), Samples(choice)).join(samples)
    of.samples = adopted
    return newest


@cache
def _read() -> dict[str, Any]:
    """Return the contents of `derived.toml`."""
    return tomllib.loads(FILE.read_text())


def _stands_in(torch: str) -> bool:
    """Return True if that torch's records of our ops count for this torch."""
    from ipex_inductor import compat  # here: reading records alone needs no torch

    releases = {".".join(name.split(".")[:2]) for name in (torch, compat.TEMPLATES)}
    return len(releases) == 1 or releases <= {f"torch {name}" for name in _read()["torches"]}

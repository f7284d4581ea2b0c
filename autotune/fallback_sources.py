"""What stands in for a measurement that nobody made: another torch's, another GPU's, a like one."""

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
UNTIMED = "cudnn.benchmark"  # a setting that many scripts make, with which nothing was measured


def gpus() -> dict[str, str]:
    """GPUs that nobody measured, and whose table stands in for each."""
    found: dict[str, str] = _read()["gpus"]
    return found


def may(problem: Problem) -> bool:
    """Whether another torch's word on it counts: of ops of ours on NVIDIA's GPUs."""
    return problem.op.startswith("ipex.") and problem.arch.startswith("sm_")


def alike(problem: Problem) -> list[tuple[str, Problem]]:
    """The problem, then those that stand in for it and nothing else is known of: in words, and it.

    A convolution as if cuDNN timed no kernels of its own (`torch.backends.cudnn.benchmark`); fp16
    as bf16, which takes the same bytes and, on these GPUs, as long to multiply.
    """
    found = [("", problem)]
    if not may(problem):
        return found
    if problem.settings == {UNTIMED: True}:
        found.append((f" without {UNTIMED}", replace(problem, settings={})))
    if {operand.dtype for operand in problem.operands} == {"float16"}:
        bf16 = tuple(replace(operand, dtype="bfloat16") for operand in problem.operands)
        found += [(f"{told} in bfloat16", replace(p, operands=bf16)) for told, p in found]
    return found


def take_over(of: Pool) -> str:
    """Have what the newest torch that stands in for this one measured be this one's; which it is.

    What failed by any of them counts too. Inductor's own templates are left out: the torch that
    measured them wrote them.
    """
    from ipex_inductor import compat

    theirs: dict[str, list[Samples]] = {}
    here: dict[bytes, Samples] = {}
    for key, samples in of.samples.items():
        torch = samples.choice.template.partition(",")[0]
        if of_this_torch(samples.choice):
            here[key] = samples
        elif not samples.choice.name.startswith("inductor.") and _stands_in(torch):
            theirs.setdefault(torch, []).append(samples)
    timed = [t for t, all_of_it in theirs.items() if any(s.timings for s in all_of_it)]
    newest = max(timed, key=lambda t: [*map(int, re.findall(r"\d+", t))], default="")
    for torch, all_of_it in theirs.items():
        for samples in all_of_it:
            if torch == newest or samples.failed:
                _, comma, version = samples.choice.template.partition(",")
                choice = replace(samples.choice, template=compat.TEMPLATES + comma + version)
                here.setdefault(encode(choice), Samples(choice)).join(samples)
    of.samples = here
    return newest


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def _stands_in(of: str) -> bool:
    """Whether what that torch's records say of our ops is taken here too."""
    from ipex_inductor import compat  # who only looks at records needs no torch

    these = {".".join(each.split(".")[:2]) for each in (of, compat.TEMPLATES)}
    return len(these) == 1 or these <= {f"torch {each}" for each in _read()["torches"]}

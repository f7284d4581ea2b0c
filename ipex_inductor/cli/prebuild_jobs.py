"""One model for one target, as a job that another process of a cluster can do."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ipex_inductor.cli.demo_models import Dtype
from ipex_inductor.cli.prebuild_inputs import examples

if TYPE_CHECKING:
    from ipex_inductor.prebuild.examples import Example
    from ipex_inductor.prebuild.graphs import Prebuilt
    from ipex_inductor.target.device import Target


@dataclass(frozen=True)
class Asked:
    """What the verb was given, in its folder."""

    model: str
    dtype: Dtype | None
    batch: int
    train: bool
    shapes: Path | None
    record: Path | None
    mode: str | None
    folder: str


@dataclass(frozen=True)
class Job:
    """The example of that number, for a target."""

    asked: Asked
    number: int
    label: str


def done_elsewhere(job: Job) -> "Prebuilt":
    """What comes of it, in a process that reads what was asked for anew."""
    from ipex_inductor.target.device import described

    os.chdir(job.asked.folder)
    return done(_examples(job.asked)[job.number], described(job.label), job.asked.mode)


def done(example: "Example", target: "Target", mode: str | None) -> "Prebuilt":
    """What comes of an example; raises what `graphs.prebuild` does."""
    from ipex_inductor.prebuild import graphs, sycl

    prebuild = sycl.prebuild if target.kind == "xpu" else graphs.prebuild
    return prebuild(
        example.model,
        example.inputs,
        target,
        kwargs=example.kwargs,
        dynamic=example.dynamic,
        training=example.training,
        optimizer=example.optimizer,
        mode=mode,
    )


@functools.lru_cache(maxsize=1)
def _examples(asked: Asked) -> "Sequence[Example]":
    a = asked
    return examples(a.model, a.dtype, a.batch, a.train, a.shapes, a.record)[0]

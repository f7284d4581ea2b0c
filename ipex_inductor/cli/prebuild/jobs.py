"""One model for one target, as a job that another process of a cluster can run."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ipex_inductor.cli.demo.models import Dtype
from ipex_inductor.cli.prebuild.inputs import examples

if TYPE_CHECKING:
    from ipex_inductor.prebuild.examples import Example
    from ipex_inductor.prebuild.graphs import Prebuilt
    from ipex_inductor.target.device import Target


@dataclass(frozen=True)
class Asked:
    """Arguments of the verb, and the folder that it was run in."""

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
    """Number of an example, and the label of the target to compile it for."""

    asked: Asked
    number: int
    label: str


def prebuild_example_remotely(job: Job) -> "Prebuilt":
    """Return the prebuilt example in a worker process that reads the examples anew."""
    from ipex_inductor.target.device import find_target

    os.chdir(job.asked.folder)
    return prebuild_example(
        _examples(job.asked)[job.number], find_target(job.label), job.asked.mode
    )


def prebuild_example(example: "Example", target: "Target", mode: str | None) -> "Prebuilt":
    """Return the prebuilt example; raise what `graphs.prebuild` raises."""
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
def _examples(request: Asked) -> "Sequence[Example]":
    r = request
    return examples(r.model, r.dtype, r.batch, r.train, r.shapes, r.record)[0]

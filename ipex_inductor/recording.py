"""What a run compiled, written down for `prebuild --from-log` (`IPEX_RECORD=FOLDER`)."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from ipex_inductor import compat

log = logging.getLogger("ipex_inductor")


def note(gm: torch.fx.GraphModule, training: bool) -> None:
    """Add a line for a Dynamo graph to this process's file, if a folder is named.

    With the shape, strides, dtype and ranges of each input that the model's caller gave. Graphs
    after a break are left out: they follow from the first. Never raises for what the disk says.
    """
    folder = os.environ.get("IPEX_RECORD")
    if not folder:
        return
    found: dict[str, Any] = {}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        value = placeholder.meta.get("example_value")
        name = compat.callers_name(placeholder)
        if name is None or not isinstance(value, torch.Tensor):
            continue
        if name.startswith("___"):  # of the stack at a break
            return
        found[name] = _told(value)
    line = json.dumps({"inputs": found, "training": training}) + "\n"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with open(Path(folder, f"{os.getpid()}.jsonl"), "a") as file:
            file.write(line)
    except OSError as error:
        log.warning("a graph is not recorded: %s", error)


def _told(value: torch.Tensor) -> dict[str, Any]:
    # Before a size is asked for as a number, which would make it one for good.
    ranges = {dim: span for dim, size in enumerate(value.shape) if (span := compat.range_of(size))}
    return {
        "shape": list(compat.hints(value)),
        "strides": [compat.hints(stride) for stride in value.stride()],
        "dtype": str(value.dtype).removeprefix("torch."),
        "requires_grad": value.requires_grad,
        "ranges": ranges,
    }

"""The process that compiles: `python -m ipex_inductor.templates.sycl.child FOLDER`, see `worker`.

It reads its task from standard input. What it made lies in the folder: `spirv`, `native`, and
`said.json`. It imports no torch, as starting is half of its time.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ipex_inductor.templates.sycl.binding import Shim, ShimError


def main() -> None:
    """Do the task."""
    folder, task = Path(sys.argv[1]), json.load(sys.stdin)
    try:
        said = _made(folder, task)
    except ShimError as error:
        said = {"error": str(error), "log": error.log}
    (folder / "said.json").write_text(json.dumps(said))


def _made(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    shim = Shim(task["libsycl"], task["shim"], task["cpu"])
    number = next((n for n, d in enumerate(shim.devices) if _is(d, task["device"])), None)
    if number is None:
        return {"error": f"SYCL sees no device like {task['device']}", "log": ""}
    queue = shim.queue(number)
    spirv, log = shim.compile(queue, task["text"], task["options"])
    (folder / "spirv").write_bytes(spirv)
    if task["native"] is not None:
        module, more = shim.load(queue, spirv, False, task["native"])
        (folder / "native").write_bytes(shim.native(module))
        log += more
    return {"error": "", "log": log}


def _is(device: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(device.get(name) == value for name, value in wanted.items())


if __name__ == "__main__":
    main()

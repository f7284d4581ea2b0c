"""The compiling process: `python -m ipex_inductor.templates.sycl.child FOLDER`, see `worker`.

It reads its task from standard input and writes its results to the folder: `spirv`, `native`, and
`said.json`. It does not import torch, as the import would double its start-up time.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ipex_inductor.templates.sycl.binding import Shim, ShimError


def main() -> None:
    """Compile the task from standard input, and write the results to the folder."""
    folder, task = Path(sys.argv[1]), json.load(sys.stdin)
    try:
        report = _compile_task(folder, task)
    except ShimError as error:
        report = {"error": str(error), "log": error.log}
    (folder / "said.json").write_text(json.dumps(report))


def _compile_task(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
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

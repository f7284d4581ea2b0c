"""`python -m ipex_inductor.as_ipex script.py [arguments]`: run a program that imports IPEX.

The program is unchanged. `-m package.module` in place of the script runs a module, as Python's own
option does.
"""

import os
import runpy
import sys
from pathlib import Path

from ipex_inductor.ipex_api import old_names
from ipex_inductor.ipex_api.compat_ipex import install

USAGE = "usage: python -m ipex_inductor.as_ipex (script.py | -m module) [arguments]"


def main(arguments: list[str]) -> None:
    """Run the program as `__main__`, with its arguments and with its folder on the path.

    Child processes find this package too, through PYTHONPATH and `sys.path`.
    """
    if arguments[:1] == ["-m"]:
        is_module, arguments = True, arguments[1:]
    else:
        is_module = False
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(USAGE)
    install()
    folder = str(Path(old_names.__file__).parent)
    sys.path.append(folder)  # `multiprocessing` passes it to child processes
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [inherited, folder]))
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

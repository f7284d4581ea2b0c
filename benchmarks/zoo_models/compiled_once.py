"""A C++ compiler that keeps what it made: the same text with the same options is not made again.

    python benchmarks/zoo_models/compiled_once.py FOLDER COMPILER ARGUMENTS...

Many kernels of two backends are the same to the byte, but for the folder that they lie in, so
`benchmarks/zoo.py` has both call this one. What runs is what the compiler would have made.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# A file of Inductor's is named by its content, and lies in a folder of its cache.
HASHED = re.compile(r"[^\s\"'<>=]*/(c[a-z2-7]{40,})")
WRAPPER = """#!/bin/sh
exec {python} -S -E {script} {folder} {compiler} "$@"
"""


def install(folder: Path, compiler: str = "g++") -> str:
    """Write a program that is called like the compiler, and return its path."""
    program = folder / "bin" / Path(compiler).name
    program.parent.mkdir(parents=True, exist_ok=True)
    real = shutil.which(compiler)
    assert real, compiler
    program.write_text(
        WRAPPER.format(python=sys.executable, script=__file__, folder=folder, compiler=real)
    )
    program.chmod(0o755)
    return str(program)


def key_of(compiler: str, arguments: list[str], source: Path) -> str:
    """Return what the result depends on but for folders of caches, as a digest."""
    text = "\0".join([compiler, *arguments, source.read_text()])
    return hashlib.sha256(HASHED.sub(r"\1", text).encode()).hexdigest()


def main() -> int:
    """Compile, or copy what was compiled; what is no single source to a result is passed on."""
    folder, compiler, *arguments = sys.argv[1:]
    sources = [Path(a) for a in arguments if a.endswith((".cpp", ".cc")) and os.path.exists(a)]
    if len(sources) != 1 or "-o" not in arguments or "-E" in arguments:
        return subprocess.call([compiler, *arguments])
    place = arguments.index("-o") + 1
    result = Path(arguments[place])
    rest = [a for n, a in enumerate(arguments) if n != place and a != str(sources[0])]
    kept = Path(folder) / key_of(compiler, rest, sources[0])
    if not kept.exists():
        if code := subprocess.call([compiler, *arguments]):
            return code
        part = kept.with_suffix(f".{os.getpid()}")
        shutil.copy(result, part)
        part.replace(kept)
        return 0
    shutil.copy(kept, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

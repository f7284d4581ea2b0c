"""List the benchmarks, or run one of them.

    python -m benchmarks
    python -m benchmarks NAME [ARGUMENT ...]

A name is an entry (`cpu`), an entry and its part (`ops conv`), or a study (`winograd`). The script
runs in place of this process, as `python benchmarks/cpu.py` does. Descriptions are read from the
sources, so the list needs neither torch nor a GPU.
"""

import argparse
import ast
import os
import shlex
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ENTRIES = ("cpu", "vision", "nlp", "train", "ops", "startup", "zoo", "zoo_gpu")
STUDIES = "studies"


def entries() -> dict[str, Path]:
    """Return the script of each entry; an entry with parts has one script for each of them."""
    scripts = {}
    for name in ENTRIES:
        if (FOLDER / name).is_dir():
            scripts |= {f"{name} {path.stem}": path for path in _scripts_in(FOLDER / name)}
        else:
            scripts[name] = FOLDER / f"{name}.py"
    return scripts


def studies() -> dict[str, Path]:
    """Return the script of each study, by its name."""
    return {path.stem: path for path in _scripts_in(FOLDER / STUDIES)}


def describe(script: Path) -> str:
    """Return the first line of a script's docstring, or of a shell script's opening comment."""
    text = script.read_text()
    if script.suffix == ".sh":
        return next(line for line in text.splitlines()[1:] if line)[1:].strip()
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def list_benchmarks() -> str:
    """Return a line for each entry and each study."""
    groups = {"Entries": entries(), "Studies": studies()}
    width = max(len(name) for scripts in groups.values() for name in scripts)
    lines = []
    for title, scripts in groups.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:{width}}  {describe(path)}" for name, path in scripts.items()]
    return "\n".join([*lines, "", "Options of one: python -m benchmarks NAME --help"]).lstrip("\n")


def find_script(words: list[str]) -> tuple[Path, list[str]] | None:
    """Return the script that the first one or two words name, and the arguments that follow."""
    scripts = studies() | entries()
    for count in (2, 1):
        if (name := " ".join(words[:count])) in scripts:
            return scripts[name], words[count:]
    return None


def main(words: list[str]) -> None:
    """Print the list if no name is given, else run the named script in place of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s [NAME [ARGUMENT ...]]",
        epilog=list_benchmarks(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if words[:1] in (["-h"], ["--help"]):
        parser.print_help()
        return
    if not words:
        print(list_benchmarks())
        return
    if not (found := find_script(words)):
        parts = [name for name in entries() if name.startswith(f"{words[0]} ")]
        known = f"name a part: {', '.join(parts)}" if parts else "the list: python -m benchmarks"
        parser.error(f"no benchmark is named {shlex.join(words[:2])!r}; {known}")
    script, arguments = found
    program = "bash" if script.suffix == ".sh" else sys.executable
    sys.stdout.flush()
    os.execvp(program, [program, str(script), *arguments])


def _scripts_in(folder: Path) -> list[Path]:
    paths = (path for path in folder.iterdir() if path.suffix in (".py", ".sh"))
    return sorted(path for path in paths if path.stem != "__init__")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Run the steps of the Dockerfile beside this file without a container.

    python examples/prebuilt_bundle/run_steps.py [--quick]

Each stage gets a folder as its file system. Its PATH has Python and `ipex-inductor`, and g++ only
where the stage installs it. Steps that install packages or make users are skipped. `--quick`
compiles for one target alone.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SKIPPED = ("apt-get", "pip", "useradd")  # this machine has the packages, and a user
PLACES = re.compile(r"(?<!\S)(?:\w+=)?(?=/(build|opt|run)/)")  # paths of the image begin here


def read_steps(text: str) -> list[tuple[str, str]]:
    """Return the instruction and the arguments of each step, with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split()[0], " ".join(line.split()[1:])) for line in joined if line.strip()]


class Stage:
    """One stage: a folder with the image's files, the current folder in it, and variables."""

    def __init__(self, root: Path) -> None:
        self.root = self.current = root
        (root / "bin").mkdir(parents=True)
        self.variables = {"PATH": f"{root}/bin", "IPEX_HOME": f"{root}/ipex_home"}
        for name, options in (("python", ""), ("ipex-inductor", "-m ipex_inductor")):
            script = root / "bin" / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
            script.chmod(0o755)

    def move(self, text: str) -> str:
        """Return the text with the image's paths moved into the stage's folder."""
        return PLACES.sub(lambda found: found[0] + str(self.root), text)

    def run(self, command: str) -> None:
        """Run a command line in the stage."""
        print("$", command, flush=True)
        environment = {**os.environ, **self.variables}
        line = self.move(command)
        subprocess.run(line, shell=True, check=True, cwd=self.current, env=environment)


def take_step(name: str, arguments: str, stages: dict[str, Stage], stage: Stage) -> None:
    """Take one step of a stage."""
    words = shlex.split(arguments)
    if name == "WORKDIR":
        stage.current = stage.root / arguments.lstrip("/")
        stage.current.mkdir(parents=True, exist_ok=True)
    elif name == "ENV":
        stage.variables.update(stage.move(word).split("=", 1) for word in words)
    elif name == "COPY":
        origin = words.pop(0).partition("=")[2] if words[0].startswith("--from=") else "context"
        for source in words[:-1]:
            shutil.copy(stages[origin].root / source.lstrip("/"), stage.current / words[-1])
    elif name == "RUN" and words[0] in SKIPPED:
        print("skipped:", arguments, flush=True)
        for tool in ("g++", "as", "ld") if "g++" in words else ():
            (stage.root / "bin" / tool).symlink_to(shutil.which(tool) or "missing")
    elif name == "RUN":
        if words[0].startswith("--mount=type=secret"):
            secret = stage.root / "run" / "secrets" / words[0].partition("id=")[2]
            secret.parent.mkdir(parents=True)
            shutil.copy(stages["context"].root / "builder.key", secret)
            arguments = arguments.removeprefix(words[0]).strip()
        stage.run(arguments)
    elif name == "CMD":
        stage.run(shlex.join(json.loads(arguments)))
    elif name != "USER":  # all steps run as the user who started this program
        sys.exit(f"run_steps.py has no way to take the step {name} {arguments}")


def main() -> None:
    """Make the keys, then take each step in the folder of its stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one target instead of two")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="prebuilt_bundle_") as folder:
        stage = Stage(Path(folder, "context"))
        stages = {"context": stage}
        for file in HERE.glob("*.py"):
            shutil.copy(file, stage.root)
        stage.run("ipex-inductor cache trust new builder")
        for name, arguments in read_steps((HERE / "Dockerfile").read_text()):
            if name == "FROM":
                stage = stages[arguments.split()[-1]] = Stage(Path(folder, arguments.split()[-1]))
            else:
                shorter = arguments.replace("--arch x86-64:avx512 ", "") if quick else arguments
                take_step(name, shorter, stages, stage)


if __name__ == "__main__":
    main()

"""The Dockerfile of the example is clean, by a linter here, and by hadolint where there is one."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import ipex_inductor

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "prebuilt_bundle" / "Dockerfile"

INSTRUCTIONS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN"),
    *("SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}
COMPILER = re.compile(r"(?<![\w-])(g\+\+|gcc|clang|cc|c\+\+|build-essential|cmake)(?![\w.-])")
SECRET = re.compile(r"(?i)\.key\b|\bid_rsa|\.pem\b|passw|token|secret|credential|\.netrc")
PINNED = re.compile(r".+:(?!latest$)[\w.-]*\d+\.\d+[\w.-]*|.+@sha256:[0-9a-f]{64}")


def read_instructions(text):
    """Return (instruction, arguments) of each, without comments, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [tuple((line.strip() + " ").split(" ", 1)) for line in joined if line.strip()]


def lint(text):
    """Return what is wrong with a Dockerfile, a line each."""
    problems, stages, name = [], {}, ""
    for instruction, arguments in read_instructions(text):
        if instruction not in INSTRUCTIONS:
            problems.append(f"unknown instruction {instruction}")
            continue
        if instruction == "FROM":
            base, _, name = arguments.strip().partition(" AS ")
            name = name or f"stage {len(stages)}"
            if base not in stages and not PINNED.fullmatch(base):
                problems.append(f"the base {base} has no version")
            stages[name] = {"base": base, "steps": list(stages.get(base, {"steps": []})["steps"])}
            continue
        if not stages:
            problems.append(f"{instruction} before FROM")
            continue
        stages[name]["steps"].append((instruction, arguments.strip()))
        problems += lint_step(instruction, arguments.strip(), stages)
    if not stages:
        return [*problems, "no FROM"]
    last = stages[name]["steps"]
    runs = [arguments for instruction, arguments in last if instruction == "RUN"]
    problems += [f"a compiler in the last stage: {run}" for run in runs if COMPILER.search(run)]
    users = [arguments for instruction, arguments in last if instruction == "USER"]
    if not users or users[-1] in ("root", "0"):
        problems.append("the last stage runs as root")
    if not {"CMD", "ENTRYPOINT"} & {instruction for instruction, _ in last}:
        problems.append("the last stage has no command")
    return problems


def lint_step(instruction, arguments, stages):
    """Return what is wrong with one step."""
    problems = []
    if instruction in ("ARG", "COPY", "ENV") and SECRET.search(arguments):
        problems.append(f"a secret in {instruction} {arguments}")
    if instruction == "COPY" and arguments.startswith("--from="):
        origin = arguments.split()[0].removeprefix("--from=")
        if origin not in stages and not PINNED.fullmatch(origin):
            problems.append(f"COPY from the unknown stage {origin}")
    for command in arguments.split("&&") if instruction == "RUN" else ():
        words = shlex.split(command)
        if words[:2] == ["pip", "install"]:
            named = [w for w in words[2:] if not w.startswith("-") and "://" not in w]
            problems += [f"{w} without a version" for w in named if "==" not in w]
        if words[:2] == ["apt-get", "install"] and "--yes" not in words and "-y" not in words:
            problems.append("apt-get install waits for an answer")
        if words[:1] == ["sudo"]:
            problems.append("sudo in a build")
    return problems


def test_the_dockerfile_is_clean():
    assert lint(DOCKERFILE.read_text()) == []
    if hadolint := shutil.which("hadolint"):
        # The base image's apt has one version of g++.
        subprocess.run([hadolint, "--ignore", "DL3008", str(DOCKERFILE)], check=True)


def test_the_dockerfile_has_the_versions_of_this_checkout():
    text = DOCKERFILE.read_text()
    assert f'ipex-inductor[sign]=={ipex_inductor.__version__}"' in text
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (pinned,) = re.findall(r"torch==\S+", text)
    assert pinned in pins


FAULTS = {
    "unknown instruction": ("WORKDIR /build", "WORKDIRS /build"),
    "base without a pinned version": ("python:3.11.14-slim-bookworm", "python:latest"),
    "base without a tag": ("python:3.11.14-slim-bookworm", "python"),
    "secret copied": ("COPY builder.pub", "COPY builder.key"),
    "secret in a variable": ("ENV MODEL_BUNDLE=", "ENV API_TOKEN=a MODEL_BUNDLE="),
    "compiler in the last stage": ("RUN useradd", "RUN apt-get install g++ && useradd"),
    "compiler in its base": ("RUN pip", "RUN apt-get install build-essential && pip"),
    "last stage from the builder": ("FROM base AS server", "FROM builder AS server"),
    "unknown stage": ("--from=builder", "--from=compiler"),
    "runs as root": ("USER server\n", ""),
    "package without a version": ("torch==2.13.0", "torch"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_linter_finds(fault):
    text, (before, after) = DOCKERFILE.read_text(), FAULTS[fault]
    assert before in text
    assert lint(text.replace(before, after, 1)) != []

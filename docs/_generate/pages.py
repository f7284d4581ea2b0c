"""Generate pages of the site from the sources: options, commands, errors, variables, results."""

import ast
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ipex_inductor import errors
from ipex_inductor.cli import VERBS
from ipex_inductor.config import own_options

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README_TABLE = re.compile(r"<!-- README: (?P<heading>[^>]+) -->")
ROWS_SHOWN = 40  # most rows of one run on a page; the file has the rest
RUNS_SHOWN = 12  # most runs on a page, the latest


def pages() -> dict[str, str]:
    """Return the text of every generated page by its path in docs/."""
    import results

    return {
        "reference/options.md": options(),
        "reference/command-line.md": command_line(),
        "reference/errors.md": error_table(),
        "reference/environment.md": environment(),
        "reference/rules.md": rules(),
        **results.pages(),
    }


def table(header: Iterable[str], rows: Iterable[Iterable[Any]], right: int = 0) -> str:
    """Return a Markdown table; columns from number `right` on are aligned right, if it is set."""
    header = list(header)
    marks = ["---" if not right or i < right else "--:" for i in range(len(header))]
    lines = [header, marks, *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Return the text of a table's cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def options() -> str:
    """Return the page of the backend's options."""
    rows = [
        (
            f"`{name}`",
            f"`{option.default!r}`",
            option.metadata["accepts"],
            option.metadata["doc"],
            f"`{option.metadata['env']}`",
        )
        for name, option in own_options().items()
    ]
    return f"""# Options

Options of `torch.compile(..., backend="ipex", options={{...}})`. This table is generated from `ipex_inductor/config.py`.

A keyword beats the environment variable, which beats the default. `mode` may also be the keyword `mode=` of `torch.compile`.
A misspelt option is an error that names the nearest ones. Every key of Inductor is accepted as well, for that call only.

{table(("option", "default", "accepts", "effect", "environment variable"), rows)}

```bash
ipex-inductor config          # values in force and where they come from
ipex-inductor config --json
```

Names of rules for the option `rules` are on the page [Rules](rules.md). What no option switches off, such as the caches or the backend,
is in the table [Switch parts off](../guides/troubleshooting.md#switch-parts-off).

## Modes

| `mode` | kernels | CUDA graphs on NVIDIA GPUs |
|---|---|---|
| `default` | by [records](../guides/autotune.md), nothing is timed | where that is faster; results stay yours |
| `reduce-overhead` | by records | Inductor's; the next call overwrites results |
| `max-autotune` | measured in the first call, then by records | Inductor's; the next call overwrites results |
| `max-autotune-no-cudagraphs` | measured in the first call, then by records | none of Inductor's |
"""


def rules() -> str:
    """Return the page of rule names."""
    from ipex_inductor.lowerings.pointwise import channel_tiles
    from ipex_inductor.passes import joint
    from ipex_inductor.passes.attention import grouped_queries
    from ipex_inductor.passes.restated import embedding_bags, frames, patches
    from ipex_inductor.passes.training import foreach, training
    from ipex_inductor.passes.weights import plain, upcast

    by_name: dict[str, tuple[set[str], str]] = {}
    for kind, found in (("inference", joint.RULES), ("training", training.RULES)):
        for rule in found:
            kinds, note = by_name.setdefault(rule.name, (set(), rule.note))
            kinds.add(kind)
            by_name[rule.name] = kinds, note or rule.note
    for each in joint.PASSES:
        if each.switch not in (None, "*"):
            by_name.setdefault(str(each.switch), ({each.graphs.name.lower()}, f"pass: {each.name}"))
    restated = (embedding_bags, frames, patches)
    for module in (channel_tiles, foreach, grouped_queries, plain, *restated, upcast):
        by_name.setdefault(module.NAME, ({"inference"}, described(Path(module.__file__))))
    for name in sorted(joint.RULE_NAMES - set(by_name)):
        by_name[name] = {"inference"}, "batch norm folding" if "norm" in name else ""
    rows = [
        (f"`{name}`", " and ".join(sorted(kinds)), note)
        for name, (kinds, note) in sorted(by_name.items())
    ]
    return f"""# Rules

Names that `options={{"rules": "-NAME"}}` switches off; `"-*"` switches off all rules. This table is generated from the rule tables
in `ipex_inductor/passes/`. `ipex-inductor explain MODEL` shows which ones applied to a model, and which were rejected and why.

{table(("name", "graphs", "note"), rows)}
"""


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words and the Click command of every command, groups included."""
    for verb in VERBS:
        yield from _below((verb,))


def _below(path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    from ipex_inductor.cli.verbs import _load

    command = _load(path)
    yield path, command
    for name in getattr(command, "commands", {}):
        yield from _below((*path, name))


def command_line() -> str:
    """Return the page of the command `ipex-inductor`."""
    import click

    parts = [
        "# Command line",
        "This page is generated from the program. `ipex-inductor COMMAND --help` prints the same text.",
        table(
            ("command", "purpose"), ((f"[`{v}`](#ipex-inductor-{v})", t) for v, t in VERBS.items())
        ),
        "Commands that take a MODEL accept `resnet50`, `bert`, `vit`, `gpt2`, or `MODULE:FUNCTION`. FUNCTION returns the model "
        "and a tuple of example inputs. An error is one line on stderr and exit code 2.",
    ]
    for path, command in commands():
        words = " ".join(("ipex-inductor", *path))
        parts.append(
            f"{'#' * min(len(path) + 1, 4)} `{words}` {{#{'-'.join(('ipex-inductor', *path))}}}"
        )
        if path == ("launch",):
            parts.append("```text\n" + _launcher_help() + "\n```")
            continue
        parts.append(textwrap.dedent(command.help or "").strip())
        if hasattr(command, "commands"):
            continue
        context = click.Context(command, info_name=words)
        usage = " ".join(command.collect_usage_pieces(context))
        parts.append(f"```text\n{words} {usage}\n```")
        rows = [
            (
                ", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts))
                if p.param_type_name == "option"
                else f"`{(p.metavar or p.name).upper().strip('[]')}`",
                getattr(p, "help", "") or "",
                "required" if p.required else _default(p),
            )
            for p in command.params
            if p.name not in ("help", "install_completion", "show_completion")
        ]
        parts.append(table(("argument or option", "meaning", "default"), rows))
    return "\n\n".join(parts) + "\n"


def _default(parameter: Any) -> str:
    value = parameter.default
    if callable(value) or value in (None, False, (), []) or type(value).__name__ == "Sentinel":
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _launcher_help() -> str:
    import contextlib
    import io
    import os

    from ipex_inductor.cpu.launch import main

    os.environ["COLUMNS"], before = "110", os.environ.get("COLUMNS")
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(["--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    text = out.getvalue().strip()
    return text if "usage:" in text else ""


def error_table() -> str:
    """Return the page of error types."""
    classes = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, Exception)]
    rows = [
        (
            f"`{c.__name__}`",
            ", ".join(f"`{b.__name__}`" for b in c.__bases__ if b is not errors.IpexError)
            or "`IpexError`",
            inspect.getdoc(c),
        )
        for c in classes
    ]
    return f"""# Errors

Types in `ipex_inductor.errors`. This table is generated from the sources.

Every message has three parts: expected, received, and advice. They are the attributes `expected`, `came` and `todo` of the exception.
`except ipex_inductor.errors.IpexError` catches all of them. Most also derive from a built-in type, so that usual handlers work.

{table(("error", "also a", "raised for"), rows)}

A graph pass that fails is no exception in your program: plain Inductor compiles the graph, and a warning says so.
`options={{"strict": True}}` raises a `PassError` instead. See [Troubleshooting](../guides/troubleshooting.md).
"""


def environment() -> str:
    """Return the page of environment variables."""
    text = (ROOT / "aot_cache" / "env_fingerprint.toml").read_text(encoding="utf-8")
    known = tomllib.loads(text)
    in_force = {o.metadata["env"]: o.metadata["doc"] for o in own_options().values()}
    own = [
        (f"`{name}`", OWN[name])
        for name in sorted(known["neutral"])
        if name.startswith("IPEX_") and name not in in_force
    ]
    options = [(f"`{env}`", doc) for env, doc in in_force.items()]
    key = [(f"`{name}`", why) for name, why in known["key"].items()]
    neutral = [
        (f"`{name}`", why) for name, why in known["neutral"].items() if not name.startswith("IPEX_")
    ]
    prefixes = ", ".join(f"`{prefix}`" for prefix in known["prefixes"])
    return f"""# Environment variables

This page is generated from `aot_cache/env_fingerprint.toml` and `ipex_inductor/config.py`.
[Switch parts off](../guides/troubleshooting.md#switch-parts-off) lists the switches of rules, caches, CUDA graph capture and the backend.

## Of this package

{table(("variable", "purpose"), own)}

## Options

Each sets the default of an [option](options.md).

{table(("variable", "effect"), options)}

## Part of the kernel cache's keys

A changed value of one of these makes a cache miss, and `ipex-inductor cache why` names it. Unlisted names that begin with
{prefixes} count too.

{table(("variable", "why it is part of the key"), key)}

## Not part of the keys

{table(("variable", "why it cannot change kept code"), neutral)}
"""


OWN: Mapping[str, str] = {
    "IPEX_AOT_BUNDLES": "bundles to read kernels and graphs from, separated by `:`",
    "IPEX_AOT_LAYERS": "read-only cache folders below the user's own, separated by `:`",
    "IPEX_AOT_QUOTA": "most bytes of the kernel cache, such as `8GiB`; least recently used entries go first",
    "IPEX_AOT_REMOTES": "fsspec addresses of remote tiers, separated by spaces, such as `s3://bucket/kernels`",
    "IPEX_AOT_VERIFY": "`1`: compile in spite of entries, and compare the generated code with them",
    "IPEX_AOT_WRITE_BACK": "`1`: also write compiled entries to the remotes",
    "IPEX_HOME": "folder of all files of this package",
    "IPEX_PRIVATE_MEMORY": "`0`: read tensors by torch's public calls only, which is slower",
    "IPEX_RECORD": "folder in which the inputs of compiled models are recorded, for `prebuild --from-log`",
}


def insert_readme_tables(text: str) -> str:
    """Return the page's text with each comment `<!-- README: HEADING -->` replaced by that table.

    Raises:
        LookupError: the README has no such section, or the section has no table.
    """
    return README_TABLE.sub(lambda match: readme_table(match["heading"]), text)


def readme_table(heading: str) -> str:
    """Return the first table of the README's section `heading`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"(?:^\|.*\n)+", section, re.M)
    if found is None:
        raise LookupError(f"README.md has no table below the heading {heading!r}")
    return found[0].rstrip("\n")


def described(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of results."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]

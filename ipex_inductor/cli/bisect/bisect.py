"""`ipex-inductor bisect`: find the rule, fold or prologue behind a wrong or a slow result."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ipex_inductor.cli.bisect.search import Finding, search
from ipex_inductor.cli.demo.models import Device
from ipex_inductor.cli.model_options import (
    AsJson,
    Batch,
    Mode,
    Precision,
    Target,
    Where,
    load_model,
)


def bisect(
    model: Target,
    mode: Mode = None,
    dtype: Precision = None,
    batch: Batch = 1,
    device: Where = Device.CPU,
    slow: Annotated[
        bool, typer.Option("--slow", help="Look for what makes it slow, not wrong.")
    ] = False,
    percent: Annotated[float, typer.Option(min=0, help="With --slow: cost that counts.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=0, help="With --slow: timing of each pair.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Find the rule, the fold or the weight preprocessing behind a wrong or a slow result.

    In inference, against eager and a float64 run. FUNCTION returns (model, tuple of example
    inputs). Exit code 0: found, 1: nothing of ours is wrong, 2: it cannot be run.
    """
    module, inputs = load_model(model, dtype, batch, device)
    from ipex_inductor.cli.bisect.trials import PARTS, Trial

    progress = Console(stderr=True)
    trial = Trial(module, inputs, mode, lambda text: progress.print(Text(text, "dim")))
    ratios: dict[str, float] = {}
    if slow:
        finding, ratios = trial.find_slow(percent, seconds)
    else:
        finding = search(trial.check, PARTS)
    if as_json:
        typer.echo(json.dumps(facts(finding, ratios), indent=2))
    else:
        show(finding, ratios, Console())
    raise typer.Exit(finding.status != "found")


def facts(finding: Finding, ratios: Mapping[str, float]) -> dict[str, Any]:
    """Return the finding as plain data; `options` of torch.compile avoid the fault."""
    from ipex_inductor.cli.bisect.trials import options_without

    values = {**asdict(finding), "off": sorted(finding.off), "ratios": dict(ratios)}
    return {"schema": 1, **values, "options": options_without(finding.off)}


def show(finding: Finding, ratios: Mapping[str, float], console: Console) -> None:
    """Print the finding and how to avoid it."""
    from ipex_inductor.cli.bisect.trials import options_without

    for part, ratio in ratios.items():
        console.print(Text(f"{part}: {ratio:.3f}x the time without it"))
    match finding.status:
        case "fine":
            console.print(Text("Nothing is wrong: no part of ours makes a difference.", "green"))
        case "not ours":
            message = f"Plain Inductor is wrong too, so it is not ours: {finding.detail}"
            console.print(Text(message, "yellow"), soft_wrap=True)
        case _:
            for parts in finding.culprits:
                console.print(Text(f"Culprit: {' together with '.join(parts)}", "red bold"))
            console.print(Text(finding.detail), soft_wrap=True)
            options = f"options={options_without(finding.off)}"
            line = f'Without it: torch.compile(model, backend="ipex", {options})'
            console.print(Text(line), soft_wrap=True)

"""`ipex-inductor explain`: show what the backend does to a model, and why not more."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

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
from ipex_inductor.errors import OptionError
from ipex_inductor.reporting.listing import show


def explain(
    model: Target,
    mode: Mode = None,
    rules: Annotated[str | None, typer.Option(help='Rules to leave out: "-name,-name".')] = None,
    dtype: Precision = None,
    batch: Batch = 1,
    device: Where = Device.CPU,
    train: Annotated[
        bool, typer.Option("--train", help="In train mode, with gradients on.")
    ] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="With symbolic sizes.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Also write a page with the graphs and the time of each kernel to this file."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a model with backend `ipex`: rules that fired, near-misses, folds, graph breaks.

    FUNCTION returns (model, tuple of example inputs); the current directory is importable.
    """
    if html is not None and not html.parent.is_dir():
        raise OptionError("--html in a folder that exists", str(html), "Make the folder first.")
    module, inputs = load_model(model, dtype, batch, device)
    compile_args: dict[str, Any] = {"mode": mode} if mode else {}
    compile_args |= {"options": {"rules": rules}} if rules else {}
    compile_args |= {"dynamic": True} if dynamic else {}

    import torch

    from ipex_inductor.inspection import explanation

    with torch.set_grad_enabled(train):
        explained = explanation.explain(
            module.train(train),
            *inputs,
            compile_args=compile_args,
            with_kernel_times=html is not None,
        )
    if html is not None:
        html.write_text(explained.to_html(), encoding="utf-8")
    if as_json:
        typer.echo(explained.to_json())
    else:
        show(Console(), explained)

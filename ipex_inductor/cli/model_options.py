"""Shared options of the verbs that compile one model: its name, how to load and compile it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ipex_inductor.cli.demo.models import MODELS, Device, Dtype, check_name, load

if TYPE_CHECKING:
    import torch

Target = Annotated[
    str, typer.Argument(metavar="MODEL", help=f"{', '.join(MODELS)} or MODULE:FUNCTION.")
]
Mode = Annotated[str | None, typer.Option(help="As torch.compile(mode=...).")]
Precision = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Cast weights and inputs. Default: as FUNCTION made them, fp32."),
]
Batch = Annotated[int, typer.Option(min=1, help="Batch size of the named models.")]
Where = Annotated[Device, typer.Option("--device", help="Where the model runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="The facts as JSON on stdout.")]


def load_model(
    name: str, dtype: Dtype | None, batch: int, device: Device
) -> tuple["torch.nn.Module", tuple[Any, ...]]:
    """Return the model in eval mode and its inputs; raise `OptionError` if there is no model."""
    check_name(name)
    return load(name, dtype, batch, device)

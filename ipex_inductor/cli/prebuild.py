"""`ipex-inductor prebuild`: a model compiled ahead, into a bundle."""

from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.cli.autotune_shared import say, say_json
from ipex_inductor.cli.cache_shared import bundle_facts, bundle_line
from ipex_inductor.cli.demo_models import Device
from ipex_inductor.cli.model_options import AsJson, Batch, Mode, Precision, Target, load_model
from ipex_inductor.errors import OptionError

_PACKAGE = """Native code for this kind of CPU, without the weights:
`ipex_inductor.load(FILE, weights=state_dict)` runs it and imports neither Dynamo nor Inductor."""


def prebuild(
    model: Target,
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle to write.")],
    package: Annotated[bool, typer.Option("--package", help=_PACKAGE)] = False,
    mode: Mode = None,
    dtype: Precision = None,
    batch: Batch = 1,
    key: Annotated[
        Path | None, typer.Option(help="The private key to sign with; `cache trust new` makes one.")
    ] = None,
    name: Annotated[
        str, typer.Option(help="The bundle's, by which older ones are known.", show_default="OUT's")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Compile a model in eval mode, for the shapes of its inputs, into a bundle for others to load.

    FUNCTION returns (model, tuple of example inputs); the current directory is importable.
    """
    if not package:
        todo = "Graphs for torch.compile: run the model, then `ipex-inductor cache pack`."
        raise OptionError("--package", "a prebuild of nothing", todo)
    module, inputs = load_model(model, dtype, batch, Device.CPU)
    from ipex_inductor.prebuild.exporting import package as packaged

    done = packaged(module, inputs, out, mode=mode, name=name, key=key)
    compiled = "compiled" if done.compiled else "from the kernel cache"
    if as_json:
        facts = {"compiled": done.compiled, "report": done.report.to_dict()}
        say_json(bundle_facts(out, done.manifest) | facts)
    else:
        unsigned = "" if key else "; it is not signed"
        say(f"{bundle_line(out, done.manifest)}; {compiled}{unsigned}", done.report.summary())

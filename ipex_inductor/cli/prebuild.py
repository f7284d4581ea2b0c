"""`ipex-inductor prebuild`: a model compiled ahead, into a bundle."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ipex_inductor.autotune.words import plain
from ipex_inductor.cli.autotune_shared import listing, say, say_json
from ipex_inductor.cli.cache_shared import bundle_facts, bundle_line, size
from ipex_inductor.cli.demo_models import Device
from ipex_inductor.cli.model_options import AsJson, Batch, Mode, Precision, Target, load_model
from ipex_inductor.errors import IpexError, OptionError

if TYPE_CHECKING:
    from ipex_inductor.prebuild.graphs import Prebuilt

_PACKAGE = """Native code for this kind of CPU, or for the GPUs of --arch, without the weights:
`ipex_inductor.load(FILE, weights=state_dict)` runs it and imports neither Dynamo nor Inductor."""
_ARCH = """A GPU to compile for, as `sm_90:NVIDIA-H200`; it need not be here. May be given again."""


def prebuild(
    model: Target,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The bundle to write.")] = None,
    arch: Annotated[list[str] | None, typer.Option("--arch", help=_ARCH)] = None,
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

    FUNCTION returns (model, tuple of example inputs); the current directory is importable. With
    --arch: graphs for torch.compile on that GPU, under torch.no_grad(). Where torch is not built
    for such GPUs kernels are compiled and no more: without --out that is all that is asked for.
    Exit code 1 if anything asked for is missing.
    """
    if not package and not arch:
        todo = "Name one; graphs for this CPU: run the model, then `ipex-inductor cache pack`."
        raise OptionError("--arch or --package", "neither", todo)
    if package:
        if out is None:
            raise OptionError("--out", "no file to write", "Name one: -o model.ipexbundle")
        _package(model, out, arch or [], mode, dtype, batch, key, name, as_json)
    else:
        _graphs(model, out, arch or [], mode, dtype, batch, key, name, as_json)


def _package(
    model: str,
    out: Path,
    archs: Sequence[str],
    mode: str | None,
    dtype: Precision,
    batch: int,
    key: Path | None,
    name: str,
    as_json: bool,
) -> None:
    from ipex_inductor.target import described

    targets = [*map(described, archs)]
    module, inputs = load_model(model, dtype, batch, Device.CPU)
    from ipex_inductor.prebuild.exporting import package as packaged

    done = packaged(module, inputs, out, targets=targets, mode=mode, name=name, key=key)
    compiled = "compiled" if done.compiled else "from the kernel cache"
    if as_json:
        facts = {"compiled": done.compiled, "report": done.report.to_dict()}
        say_json(bundle_facts(out, done.manifest) | facts)
    else:
        unsigned = "" if key else "; it is not signed"
        say(f"{bundle_line(out, done.manifest)}; {compiled}{unsigned}", done.report.summary())


def _graphs(
    model: str,
    out: Path | None,
    archs: Sequence[str],
    mode: str | None,
    dtype: Precision,
    batch: int,
    key: Path | None,
    name: str,
    as_json: bool,
) -> None:
    from ipex_inductor.target import described

    targets = {str(target): target for target in map(described, archs)}
    module, inputs = load_model(model, dtype, batch, Device.CPU)
    from ipex_inductor.prebuild import graphs

    built: dict[str, Prebuilt | str] = {}
    for label, target in targets.items():
        try:
            built[label] = graphs.prebuild(module, inputs, target, mode=mode)
        except IpexError:
            raise
        except Exception as error:  # what the model or a compiler does must not hide the others
            built[label] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    done = [each for each in built.values() if not isinstance(each, str)]
    packed = None
    if out is not None and any(each.entries for each in done):
        packed = graphs.pack(done, out, name=name, key=key)
    missing = {label: _missing(each, out is not None) for label, each in built.items()}
    if as_json:
        facts = bundle_facts(out, packed) if out and packed else {"path": None}
        rows = [_facts(n, each) | {"missing": missing[n]} for n, each in built.items()]
        say_json(facts | {"targets": rows})
    else:
        _show(built, missing)
        unsigned = "" if key else "; it is not signed"
        say(f"{bundle_line(out, packed)}{unsigned}" if out and packed else "no bundle")
    if any(missing.values()):
        raise typer.Exit(1)


def _missing(each: "Prebuilt | str", bundled: bool) -> list[str]:
    if isinstance(each, str):
        return [each]
    if bundled and each.kernels_only:
        todo = "install the build of torch that the GPU's machine has; it needs no GPU"
        return [f"its graphs: {each.kernels_only} ({todo})"]
    return each.missing


def _facts(label: str, each: "Prebuilt | str") -> dict[str, Any]:
    if isinstance(each, str):
        return {"target": label, "makes": "nothing"}
    return {
        "target": label,
        "makes": "kernels only" if each.kernels_only else "graphs",
        "graphs": each.graphs,
        "kernels": len(each.made.kernels),
        "untimed": each.made.untimed,
        "choices": [str(event) for event in each.events if event.kind == "choice"],
        "not_taken": [str(event) for event in each.events if event.kind == "missed"],
        "bytes": sum(len(entry.blob) for entry in each.entries.values()),
        "seconds": round(each.seconds, 2),
    }


def _show(built: "dict[str, Prebuilt | str]", missing: dict[str, list[str]]) -> None:
    table = listing("target", "makes", "graphs", "kernels", "untimed", "size", "seconds")
    for label, each in built.items():
        if isinstance(each, str):
            cells = [label, "nothing", *[""] * 5]
        else:
            facts = _facts(label, each)
            cells = [
                label,
                facts["makes"],
                str(each.graphs),
                str(len(each.made.kernels)),
                str(len(each.made.untimed)),
                size(facts["bytes"]),
                f"{each.seconds:.1f}",
            ]
        table.add_row(*(Text(plain(cell)) for cell in cells))
    say(table)
    for label, reasons in missing.items():
        for reason in reasons:
            say(plain(f"missing for {label}: {reason}"))

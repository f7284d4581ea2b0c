"""`ipex-inductor prebuild`: compile models ahead of time into a bundle."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ipex_inductor.autotune.comparison.words import replace_unprintable
from ipex_inductor.autotune.fleet import spread
from ipex_inductor.cli.autotune.run import Engine
from ipex_inductor.cli.cache.shared import bundle_facts, bundle_line, size
from ipex_inductor.cli.demo.models import MODELS, Device
from ipex_inductor.cli.model_options import AsJson, Batch, Mode, Precision, load_model
from ipex_inductor.cli.prebuild.inputs import examples
from ipex_inductor.cli.prebuild.jobs import Asked, Job, prebuild_example, prebuild_example_remotely
from ipex_inductor.cli.shared import say, say_json, say_reasons
from ipex_inductor.errors import CompilerNotFoundError, DeviceError, OptionError, TargetError
from ipex_inductor.reporting.listing import Listing, number

if TYPE_CHECKING:
    from ipex_inductor.prebuild.examples import Example
    from ipex_inductor.prebuild.graphs import Prebuilt
    from ipex_inductor.target.device import Target

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"{', '.join(MODELS)}, MODULE:FUNCTION, or a folder of files with a function `make`.",
    ),
]
_PACKAGE = """Native code for this kind of CPU, or for CPUs and GPUs of --arch, without the weights:
`ipex_inductor.load(FILE, weights=state_dict)` runs it and imports neither Dynamo nor Inductor."""
_ARCH = """What to compile for, as `h200`, `sm_90:NVIDIA-H200`, `xe:bmg` or `x86-64:avx2`; it need
not be here. Of an architecture alone (`sm_90`) the first that is known. May be given again."""
_TRAIN = """Forward and backward of the model in train mode, and the fused step of its optimizer."""
_SHAPES = """A file with a line for each set of inputs: sizes as `8x3x224x224 8`; `16..512` is a
range, for which a caller uses torch._dynamo.mark_dynamic."""
_LOG = """The folder that a run of this model wrote with IPEX_RECORD: its very inputs."""
_ENGINE = "This process, or the cores of a Ray cluster, which sees the same files."
_ADDRESS = "Of the Ray cluster. Default: this machine's."
_NAME = "The bundle's, by which older ones are known."
_KEY = "The private key to sign with; `cache trust new` makes one."


def prebuild(
    model: Model,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The bundle to write.")] = None,
    arch: Annotated[list[str] | None, typer.Option("--arch", help=_ARCH)] = None,
    package: Annotated[bool, typer.Option("--package", help=_PACKAGE)] = False,
    train: Annotated[bool, typer.Option("--train", help=_TRAIN)] = False,
    shapes: Annotated[Path | None, typer.Option(help=_SHAPES)] = None,
    from_log: Annotated[Path | None, typer.Option("--from-log", help=_LOG)] = None,
    engine: Annotated[Engine, typer.Option(help=_ENGINE)] = Engine.LOCAL,
    address: Annotated[str | None, typer.Option(help=_ADDRESS)] = None,
    mode: Mode = None,
    dtype: Precision = None,
    batch: Batch = 1,
    key: Annotated[Path | None, typer.Option(help=_KEY)] = None,
    name: Annotated[str, typer.Option(help=_NAME, show_default="OUT's")] = "",
    as_json: AsJson = False,
) -> None:
    """Compile models, for the shapes of their inputs, into a bundle for others to load.

    FUNCTION returns (model, tuple of example inputs), or a list of such tuples; ranges of sizes,
    {input: {dimension: (least, most)}}, and an optimizer may follow. The current directory is
    importable. With --arch: graphs for torch.compile on that GPU, or on CPUs of that level, under
    torch.no_grad() unless --train. Where torch is not built for such GPUs only kernels are
    compiled, which suffices without --out. Exit code 1 if a requested part is missing.
    """
    if not package and not arch:
        advice = "Name one; graphs for this CPU: run the model, then `ipex-inductor cache pack`."
        raise OptionError("--arch or --package", "neither", advice)
    if package:
        if out is None:
            raise OptionError("--out", "no file to write", "Name one: -o model.ipexbundle")
        if train or shapes or from_log or Path(model).is_dir():
            refused_options = "--train, --shapes, --from-log or a folder"
            raise OptionError(
                "one model in eval mode to package", refused_options, "Package it alone."
            )
        _package(model, out, arch or [], mode, dtype, batch, key, name, as_json)
        return
    if shapes and from_log:
        raise OptionError("--shapes or --from-log", "both", "Give one of the two.")
    targets = {str(target): target for target in _targets(arch or [])}
    wanted, refused = examples(model, dtype, batch, train, shapes, from_log)
    say_reasons("records", refused)
    request = Asked(model, dtype, batch, train, shapes, from_log, mode, os.getcwd())
    built = dict(_prebuild_all(targets, wanted, request, engine, address))
    built = {
        (label, example.name): built[label, example.name] for label in targets for example in wanted
    }
    _finish(built, out, key, name, as_json)


def _targets(archs: Sequence[str]) -> "list[Target]":
    """Return the targets with these names; raise `TargetError` for an unknown one.

    A name that is an architecture alone becomes the first such target of the table, which is
    reported.
    """
    from ipex_inductor.target.device import find_target, first_of

    targets = []
    for name in archs:
        if first := first_of(name):
            print(f"--arch {name}: for {first}, the first of that architecture", file=sys.stderr)
        targets.append(first or find_target(name))
    return targets


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
    """Compile one model into a package and report it.

    Args:
        model: the named model, or MODULE:FUNCTION.
        out: the bundle to write.
        archs: names of the targets, none for this kind of CPU.
        mode: the mode of torch.compile.
        dtype: the dtype of weights and inputs.
        batch: the batch size of the named models.
        key: the private key to sign with.
        name: the name of the bundle.
        as_json: whether to print JSON.
    """
    targets = _targets(archs)
    module, inputs = load_model(model, dtype, batch, Device.CPU)
    from ipex_inductor.prebuild.exporting import package as packaged

    packed = packaged(module, inputs, out, targets=targets, mode=mode, name=name, key=key)
    compiled = "compiled" if packed.compiled else "from the kernel cache"
    if as_json:
        facts = {"compiled": packed.compiled, "report": packed.report.to_dict()}
        say_json(bundle_facts(out, packed.manifest) | facts)
    else:
        unsigned = "" if key else "; it is not signed"
        say(f"{bundle_line(out, packed.manifest)}; {compiled}{unsigned}", packed.report.summary())


Place = tuple[str, str]  # the label of a target, and the name of an example


def _prebuild_all(
    targets: "Mapping[str, Target]",
    examples: "Sequence[Example]",
    request: Asked,
    engine: Engine,
    address: str | None,
) -> "Iterator[tuple[Place, Prebuilt | str]]":
    """Yield the result of each example on each target: a `Prebuilt`, or the error's text.

    Args:
        targets: the targets by label.
        examples: the models with their inputs.
        request: the arguments of the verb, from which another process can read the examples anew.
        engine: this process or a Ray cluster.
        address: the address of the Ray cluster.
    """
    jobs = [Job(request, n, label) for label in targets for n in range(len(examples))]
    names = [example.name for example in examples]
    with _progress(len(jobs)) as count:
        if engine is Engine.RAY:
            for job, prebuilt in spread(jobs, prebuild_example_remotely, address):
                count(f"{names[job.number]} for {job.label}", 1)
                yield (job.label, names[job.number]), prebuilt
            return
        for job in jobs:
            count(f"{names[job.number]} for {job.label}", 0)
            try:
                yield (
                    (job.label, names[job.number]),
                    prebuild_example(examples[job.number], targets[job.label], request.mode),
                )
            except (CompilerNotFoundError, DeviceError, OptionError, TargetError):
                raise  # these errors hold for all jobs
            except Exception as error:  # a model, or a compiler, must not hide the others
                message_lines = str(error).strip().splitlines() or [""]
                yield (job.label, names[job.number]), f"{type(error).__name__}: {message_lines[0]}"
            count("", 1)


@contextmanager
def _progress(count: int) -> "Iterator[Any]":
    """Show a bar on stderr; yield a function of a description and a number of finished jobs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=count)

        def advance(what: str, finished: int) -> None:
            progress.update(task, advance=finished, description=replace_unprintable(what)[:60])

        yield advance


def _finish(
    built: "Mapping[Place, Prebuilt | str]",
    out: Path | None,
    key: Path | None,
    name: str,
    as_json: bool,
) -> None:
    """Pack the results, report them, and exit with 1 if something is missing.

    Args:
        built: the result of each pair of target and example.
        out: the bundle to write, None for none.
        key: the private key to sign with.
        name: the name of the bundle.
        as_json: whether to print JSON.
    """
    from ipex_inductor.prebuild import graphs

    prebuilt = [result for result in built.values() if not isinstance(result, str)]
    packed = None
    if out is not None and any(result.entries or result.own for result in prebuilt):
        packed = graphs.pack(prebuilt, out, name=name, key=key)
    missing = {place: _list_missing(result, out is not None) for place, result in built.items()}
    if as_json:
        facts = bundle_facts(out, packed) if out and packed else {"path": None}
        rows = [
            _facts(place, result) | {"missing": missing[place]} for place, result in built.items()
        ]
        say_json(facts | {"targets": rows})
    else:
        _show(built, missing)
        unsigned = "" if key else "; it is not signed"
        say(f"{bundle_line(out, packed)}{unsigned}" if out and packed else "no bundle")
    if any(missing.values()):
        raise typer.Exit(1)


def _list_missing(result: "Prebuilt | str", bundled: bool) -> list[str]:
    if isinstance(result, str):
        return [result]
    if bundled and result.kernels_only and result.graphs:
        advice = "install the build of torch that the GPU's machine has; it needs no GPU"
        return [f"its graphs: {result.kernels_only} ({advice})"]
    return result.missing


def _facts(place: Place, result: "Prebuilt | str") -> dict[str, Any]:
    label, name = place
    if isinstance(result, str):
        return {"target": label, "model": name, "makes": "nothing"}
    choices = [event for event in result.events if event.kind == "choice"]
    return {
        "target": label,
        "model": name,
        "makes": "kernels only" if result.kernels_only else "graphs",
        "graphs": result.graphs,
        "kernels": len(result.made.kernels),
        "own_kernels": len(result.own),
        "untimed": result.made.untimed,
        "choices": [str(event) for event in choices],
        "chosen_by": _sources(choices),
        "not_taken": [str(event) for event in result.events if event.kind == "missed"],
        "bytes": sum(len(e.blob) for e in (result.entries | result.own).values()),
        "seconds": round(result.seconds, 2),
        "native": result.native,
        "gate": [dict(row) for row in result.gate],
    }


def _show_gate(model: str, result: "Prebuilt") -> None:
    """Print the figures of each SYCL kernel's binary, and whether it meets its promises."""
    say(
        replace_unprintable(
            f"{result.target}: {model}: kernels in SYCL; native code: {result.native}"
        )
    )
    figures = ("lanes", "registers", "local", "spilled", "private")
    table = Listing("kernel", *map(number, figures), "engine", "gate")
    for row in result.gate:
        cells = [row["name"], *(str(row.get(f, "")) for f in figures)]
        engine = {"True": "yes", "False": "no"}.get(str(row.get("engine")), "")
        table.add_row(
            *(Text(replace_unprintable(c)) for c in (*cells, engine, row["wrong"] or "ok"))
        )
    say(table)


def _sources(choices: "Sequence[Any]") -> dict[str, int]:
    """Return how many choices each source made; "nobody" counts choices without records."""
    names = {"shipped": "table", "derived": "derived", "model": "model", "recorded": "record"}
    counts: dict[str, int] = {}
    for event in choices:
        source = next(
            (name for label, name in names.items() if f", {label}" in event.reason), "nobody"
        )
        counts[source] = counts.get(source, 0) + 1
    return counts


def _show(built: "Mapping[Place, Prebuilt | str]", missing: dict[Place, list[str]]) -> None:
    figures = ("graphs", "kernels", "own", "untimed", "size", "seconds")
    for (_, name), result in built.items():
        if not isinstance(result, str) and result.native:
            _show_gate(name, result)
    table = Listing("target", "model", "makes", *map(number, figures), "chosen by")
    for place, result in built.items():
        facts = _facts(place, result)
        cells = [facts["target"], facts["model"], facts["makes"], *[""] * 7]
        if not isinstance(result, str):
            counts = facts["graphs"], facts["kernels"], facts["own_kernels"], len(facts["untimed"])
            cells[3:] = [
                *map(str, counts),
                size(facts["bytes"]),
                f"{result.seconds:.1f}",
                ", ".join(f"{source} {n}" for source, n in facts["chosen_by"].items()),
            ]
        table.add_row(*(Text(replace_unprintable(cell)) for cell in cells))
    say(table)
    for (label, name), reasons in missing.items():
        for reason in reasons:
            say(replace_unprintable(f"missing for {label}: {name}: {reason}"))

"""`ipex-inductor prebuild`: models compiled ahead, into a bundle."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ipex_inductor.autotune.fleet import spread
from ipex_inductor.autotune.words import plain
from ipex_inductor.cli.autotune_run import Engine
from ipex_inductor.cli.autotune_shared import say, say_json, say_reasons
from ipex_inductor.cli.cache_shared import bundle_facts, bundle_line, size
from ipex_inductor.cli.demo_models import MODELS, Device
from ipex_inductor.cli.model_options import AsJson, Batch, Mode, Precision, load_model
from ipex_inductor.cli.prebuild_inputs import examples
from ipex_inductor.cli.prebuild_jobs import Asked, Job, done, done_elsewhere
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
    torch.no_grad() unless --train. Where torch is not built for such GPUs kernels are compiled and
    no more: without --out that is all that is asked for. Exit code 1 if anything asked for is
    missing.
    """
    if not package and not arch:
        todo = "Name one; graphs for this CPU: run the model, then `ipex-inductor cache pack`."
        raise OptionError("--arch or --package", "neither", todo)
    if package:
        if out is None:
            raise OptionError("--out", "no file to write", "Name one: -o model.ipexbundle")
        if train or shapes or from_log or Path(model).is_dir():
            came = "--train, --shapes, --from-log or a folder"
            raise OptionError("one model in eval mode to package", came, "Package it alone.")
        _package(model, out, arch or [], mode, dtype, batch, key, name, as_json)
        return
    if shapes and from_log:
        raise OptionError("--shapes or --from-log", "both", "Give one of the two.")
    targets = {str(target): target for target in _targets(arch or [])}
    wanted, others = examples(model, dtype, batch, train, shapes, from_log)
    say_reasons("records", others)
    asked = Asked(model, dtype, batch, train, shapes, from_log, mode, os.getcwd())
    built = dict(_built(targets, wanted, asked, engine, address))
    built = {(label, each.name): built[label, each.name] for label in targets for each in wanted}
    _finish(built, out, key, name, as_json)


def _targets(archs: Sequence[str]) -> "list[Target]":
    """Return the targets with these names; of an architecture alone the table's first, said so.

    Raises `TargetError`.
    """
    from ipex_inductor.target.device import described, first_of

    found = []
    for name in archs:
        if first := first_of(name):
            print(f"--arch {name}: for {first}, the first of that architecture", file=sys.stderr)
        found.append(first or described(name))
    return found


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
    targets = _targets(archs)
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


Place = tuple[str, str]  # a target, and an example


def _built(
    targets: "Mapping[str, Target]",
    examples: "Sequence[Example]",
    asked: Asked,
    engine: Engine,
    address: str | None,
) -> "Iterator[tuple[Place, Prebuilt | str]]":
    jobs = [Job(asked, n, label) for label in targets for n in range(len(examples))]
    names = [each.name for each in examples]
    with _progress(len(jobs)) as count:
        if engine is Engine.RAY:
            for job, found in spread(jobs, done_elsewhere, address):
                count(f"{names[job.number]} for {job.label}", 1)
                yield (job.label, names[job.number]), found
            return
        for job in jobs:
            count(f"{names[job.number]} for {job.label}", 0)
            try:
                yield (
                    (job.label, names[job.number]),
                    done(examples[job.number], targets[job.label], asked.mode),
                )
            except (CompilerNotFoundError, DeviceError, OptionError, TargetError):
                raise  # which hold for all of them
            except Exception as error:  # a model, or a compiler, must not hide the others
                said = str(error).strip().splitlines() or [""]
                yield (job.label, names[job.number]), f"{type(error).__name__}: {said[0]}"
            count("", 1)


@contextmanager
def _progress(count: int) -> "Iterator[Any]":
    """A bar on stderr; what is given is called with what begins, and how many are done."""
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

        def told(what: str, done: int) -> None:
            progress.update(task, advance=done, description=plain(what)[:60])

        yield told


def _finish(
    built: "Mapping[Place, Prebuilt | str]",
    out: Path | None,
    key: Path | None,
    name: str,
    as_json: bool,
) -> None:
    """Pack what was built, tell what it is, and end with 1 where something is missing."""
    from ipex_inductor.prebuild import graphs

    done = [each for each in built.values() if not isinstance(each, str)]
    packed = None
    if out is not None and any(each.entries or each.own for each in done):
        packed = graphs.pack(done, out, name=name, key=key)
    missing = {place: _missing(each, out is not None) for place, each in built.items()}
    if as_json:
        facts = bundle_facts(out, packed) if out and packed else {"path": None}
        rows = [_facts(place, each) | {"missing": missing[place]} for place, each in built.items()]
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
    if bundled and each.kernels_only and each.graphs:
        todo = "install the build of torch that the GPU's machine has; it needs no GPU"
        return [f"its graphs: {each.kernels_only} ({todo})"]
    return each.missing


def _facts(place: Place, each: "Prebuilt | str") -> dict[str, Any]:
    label, name = place
    if isinstance(each, str):
        return {"target": label, "model": name, "makes": "nothing"}
    choices = [event for event in each.events if event.kind == "choice"]
    return {
        "target": label,
        "model": name,
        "makes": "kernels only" if each.kernels_only else "graphs",
        "graphs": each.graphs,
        "kernels": len(each.made.kernels),
        "own_kernels": len(each.own),
        "untimed": each.made.untimed,
        "choices": [str(event) for event in choices],
        "chosen_by": _sources(choices),
        "not_taken": [str(event) for event in each.events if event.kind == "missed"],
        "bytes": sum(len(e.blob) for e in (each.entries | each.own).values()),
        "seconds": round(each.seconds, 2),
        "native": each.native,
        "gate": [dict(row) for row in each.gate],
    }


def _show_gate(model: str, each: "Prebuilt") -> None:
    """What binaries of kernels in SYCL say of themselves, and whether that is as promised."""
    say(plain(f"{each.target}: {model}: kernels in SYCL; native code: {each.native}"))
    figures = ("lanes", "registers", "local", "spilled", "private")
    table = Listing("kernel", *map(number, figures), "engine", "gate")
    for row in each.gate:
        cells = [row["name"], *(str(row.get(f, "")) for f in figures)]
        engine = {"True": "yes", "False": "no"}.get(str(row.get("engine")), "")
        table.add_row(*(Text(plain(c)) for c in (*cells, engine, row["wrong"] or "ok")))
    say(table)


def _sources(choices: "Sequence[Any]") -> dict[str, int]:
    """How many choices each source made; none where nothing is known."""
    known = {"shipped": "table", "derived": "derived", "model": "model", "recorded": "record"}
    counts: dict[str, int] = {}
    for event in choices:
        source = next(
            (name for word, name in known.items() if f", {word}" in event.reason), "nobody"
        )
        counts[source] = counts.get(source, 0) + 1
    return counts


def _show(built: "Mapping[Place, Prebuilt | str]", missing: dict[Place, list[str]]) -> None:
    figures = ("graphs", "kernels", "own", "untimed", "size", "seconds")
    for (_, name), each in built.items():
        if not isinstance(each, str) and each.native:
            _show_gate(name, each)
    table = Listing("target", "model", "makes", *map(number, figures), "chosen by")
    for place, each in built.items():
        facts = _facts(place, each)
        cells = [facts["target"], facts["model"], facts["makes"], *[""] * 7]
        if not isinstance(each, str):
            counts = facts["graphs"], facts["kernels"], facts["own_kernels"], len(facts["untimed"])
            cells[3:] = [
                *map(str, counts),
                size(facts["bytes"]),
                f"{each.seconds:.1f}",
                ", ".join(f"{source} {n}" for source, n in facts["chosen_by"].items()),
            ]
        table.add_row(*(Text(plain(cell)) for cell in cells))
    say(table)
    for (label, name), reasons in missing.items():
        for reason in reasons:
            say(plain(f"missing for {label}: {name}: {reason}"))

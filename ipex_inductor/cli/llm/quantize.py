"""`ipex-inductor llm quantize`: write a checkpoint with quantized weights."""

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ipex_inductor.cli.demo.models import DTYPES, Dtype
from ipex_inductor.cli.llm.bench import MIB, Weights
from ipex_inductor.cli.llm.jobs import Job
from ipex_inductor.cli.llm.models import SHAPES, check_model, find_shape, is_quantized, load_model
from ipex_inductor.cli.shared import AsJson, say, say_json
from ipex_inductor.errors import OptionError
from ipex_inductor.reporting.listing import Listing, number

if TYPE_CHECKING:
    from torch import Tensor

    from ipex_inductor.quantization.weight_only import WeightOnlyReport

# Files of a model's folder that belong to its text, not to its weights.
CARRIED = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja", "*.model")
CARRIED_SETTINGS = ("generation_config.json", "added_tokens.json", "preprocessor_config.json")
Step = Callable[[str, int, int], None]


def llm_quantize(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=f"A folder of transformers, or {', '.join(SHAPES)}."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must be new.")],
    weights: Annotated[Weights, typer.Option(help="Type of the quantized weights.")] = Weights.INT4,
    group_size: Annotated[
        int | None,
        typer.Option(help="Weights that share a scale; -1 for a row. [int4, nf4: 128; others: -1]"),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric", help="Without or with zero points. [int4: with; others: no]"
        ),
    ] = None,
    gptq: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Round by GPTQ, with this text for calibration."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of the text for GPTQ.")] = 128,
    length: Annotated[int, typer.Option(min=16, help="Tokens of each piece.")] = 512,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="GPTQ: columns with large activations first.")
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Module that stays in floating point; repeat it."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of what is not quantized.")] = Dtype.BF16,
    as_json: AsJson = False,
) -> None:
    """Quantize the weights of a language model, layer by layer; OUT appears once it is whole.

    `ipex.llm.optimize(low_precision_checkpoint=OUT)` loads it. INT4 and INT8 are written in GPTQ's
    format, which other programs read, NF4 and FP8 in our own.
    """
    check_arguments(model, out, gptq, act_order)
    settings = _read_settings(weights, group_size, symmetric)
    import torch

    began = time.perf_counter()
    module = load_model(model, getattr(torch, DTYPES[dtype]), "cpu")
    with whole_folder(out) as folder, _progress() as step:
        if gptq is None:
            _round(module, settings, skip or (), step)
        else:
            pieces = read_pieces(model, gptq, samples, length)
            _calibrate(module, pieces, settings, act_order, skip or (), step)
        _write(module, folder, model)
    from ipex_inductor.quantization.weight_only import report_weights

    facts = describe(report_weights(module), settings, time.perf_counter() - began)
    if as_json:
        say_json({"folder": str(out), **facts})
    else:
        say(_make_table(facts), f"written to {out}")


def check_arguments(model: str, out: Path, gptq: Path | None, act_order: bool) -> None:
    """Raise `OptionError` for arguments that do not go together, before the work is done."""
    check_model(model)
    shape = find_shape(model)
    if shape is None and is_quantized(model):
        came = f"{model}, which is quantized"
        raise OptionError("MODEL with floating point weights", came, "Pass the plain model.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError("OUT: a folder that is new or empty", str(out), "Name another one.")
    if not out.absolute().parent.is_dir():
        raise OptionError("OUT in a folder that exists", str(out), "Make the folder first.")
    if gptq is None:
        if act_order:
            advice = "Add --gptq FILE with text for calibration."
            raise OptionError("--gptq beside --act-order", "--act-order alone", advice)
        return
    if not gptq.is_file():
        raise OptionError("--gptq FILE: a text file", f"no file {str(gptq)!r}", "Check the path.")
    if shape is not None:
        advice = "Pass the folder of a model, or leave --gptq out."
        raise OptionError("a model with a tokenizer for --gptq", f"the shape {model}", advice)


def _read_settings(weights: Weights, group_size: int | None, symmetric: bool | None) -> Any:
    """Return the settings of all layers.

    Raises:
        QuantizationError: if they do not go together.
    """
    from dataclasses import replace

    from ipex_inductor.quantization.weight_only import WoqWeightQScheme

    size = group_size
    if size is None:
        size = 128 if weights in (Weights.INT4, Weights.NF4) else -1
    if symmetric is None:
        symmetric = weights is not Weights.INT4
    scheme = WoqWeightQScheme.SYMMETRIC if symmetric else WoqWeightQScheme.ASYMMETRIC
    plain = Job("", "", weights=str(weights), group_size=size).qconfig()
    return replace(plain, weight_qscheme=scheme)


def _round(module: Any, settings: Any, skip: Any, step: Step) -> None:
    from ipex_inductor.quantization import quantize_weights

    quantize_weights(module, settings, inplace=True, skip=skip, step=step)


def _calibrate(
    module: Any, pieces: "list[Tensor]", settings: Any, act_order: bool, skip: Any, step: Step
) -> None:
    """Quantize a model by GPTQ.

    Args:
        module: the model, which is changed.
        pieces: tokens for calibration.
        settings: of all layers.
        act_order: round columns with large activations first.
        skip: paths of modules that stay in floating point.
        step: called before each block.
    """
    from ipex_inductor.quantization.weight_only import gptq

    gptq(
        module,
        pieces,
        group_size=settings.group_size,
        sym=settings.is_symmetric,
        act_order=act_order,
        nsamples=len(pieces),
        weight_dtype=settings.weight_dtype,
        skip=skip,
        inplace=True,
        step=step,
    )


def read_pieces(model: str, file: Path, samples: int, length: int) -> "list[Tensor]":
    """Return a text as pieces of tokens, [1, length] each, spread over the whole text.

    Args:
        model: folder with a tokenizer.
        file: the text.
        samples: most pieces.
        length: tokens of a piece.

    Raises:
        OptionError: for a text that is too short for one piece.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = file.read_text(encoding="utf-8")
    tokens = tokenizer(text, return_tensors="pt").input_ids
    count = tokens.shape[1] // length
    if not count:
        came = f"{tokens.shape[1]} tokens in {file}"
        raise OptionError(f"a text of {length} tokens or more", came, "Use a longer text.")
    used = min(samples, count)
    starts = [number * count // used * length for number in range(used)]
    return [tokens[:, start : start + length] for start in starts]


def _write(module: Any, folder: Path, model: str) -> None:
    """Write the checkpoint, and the files of the model's folder that belong to its text."""
    from ipex_inductor.quantization.weight_only.saving import fits_gptq, save_gptq, save_native

    save = save_gptq if fits_gptq(module) else save_native
    save(module, folder)
    if find_shape(model):
        return
    for pattern in (*CARRIED, *CARRIED_SETTINGS):
        for file in Path(model).glob(pattern):
            shutil.copy2(file, folder / file.name)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that takes its name at the end; it is removed after an error.

    A signal to end the process counts as an error too.
    """

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp's is the owner's alone
        if out.is_dir():
            out.rmdir()
        folder.replace(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> "Iterator[Step]":
    """Show a bar on stderr, or lines where that is no terminal; yield what advances them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name, number, count: typer.echo(f"{number + 1}/{count} {name}", err=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=None)

        def advance(name: str, number: int, count: int) -> None:
            text = name.replace("[", "\\[")
            progress.update(task, description=text, completed=number, total=count)

        yield advance


def describe(report: "WeightOnlyReport", settings: Any, seconds: float) -> dict[str, Any]:
    """Return what was quantized: numbers of layers, and bytes of their weights."""
    layers = report.quantized
    return {
        "weights": settings.weight_dtype.name.lower(),
        "group_size": settings.group_size,
        "symmetric": settings.is_symmetric,
        "layers": len(layers),
        "floating": {layer.name: layer.reason for layer in report.skipped},
        "notes": {layer.name: layer.note for layer in layers if layer.note},
        "bytes_before": sum(layer.float_bytes for layer in layers),
        "bytes_after": sum(layer.stored_bytes for layer in layers),
        "seconds": round(seconds, 1),
    }


def _make_table(facts: dict[str, Any]) -> Listing:
    heads = ("layers", "MiB before", "MiB after", "seconds")
    table = Listing("weights", *map(number, heads), "in floating point")
    size = "a row" if facts["group_size"] == -1 else str(facts["group_size"])
    table.add_row(
        f"{facts['weights']}, groups of {size}",
        str(facts["layers"]),
        f"{facts['bytes_before'] / MIB:.1f}",
        f"{facts['bytes_after'] / MIB:.1f}",
        f"{facts['seconds']:.1f}",
        "\n".join(f"{name}: {reason}" for name, reason in facts["floating"].items()) or "none",
    )
    return table

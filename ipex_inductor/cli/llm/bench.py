"""`ipex-inductor llm bench`: time prompts and decoding of a language model."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ipex_inductor.cli.demo.models import Device, Dtype
from ipex_inductor.cli.llm.jobs import ChildError, Job, start_child
from ipex_inductor.cli.llm.models import SHAPES, check_model
from ipex_inductor.cli.llm.results import describe_error, summarize
from ipex_inductor.cli.shared import AsJson, say, say_json
from ipex_inductor.errors import OptionError
from ipex_inductor.reporting.listing import Listing, number

OURS = "ours"
MIB = 1 << 20
READ = "a token's weights and cache over the {kind} bandwidth, measured behind each row"
KINDS = {"cpu": "read", "cuda": "copy", "xpu": "copy"}
PEAKS = {"cpu": "of the whole process", "cuda": "of torch's tensors", "xpu": "of torch's tensors"}


class Beside(StrEnum):
    """Variants to compare with."""

    EAGER = "eager"
    INDUCTOR = "inductor"
    REDUCE_OVERHEAD = "reduce-overhead"


class Weights(StrEnum):
    """Types of quantized weights."""

    INT8 = "int8"
    INT4 = "int4"
    NF4 = "nf4"
    FP8 = "fp8"


class Lowp(StrEnum):
    """Precisions of GEMMs on quantized weights; NONE is that of the activations."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True)
class Variant:
    """A row of the table: its name and its job."""

    name: str
    job: Job

    @property
    def checked_by(self) -> tuple[str, int, str]:
        """Return what the exact logits depend on."""
        return self.job.weights, self.job.group_size, self.job.lowp_mode


def llm_bench(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"A folder of transformers, also a quantized one; or a shape with random weights:"
            f" {', '.join(SHAPES)}; SHAPE:LAYERS for fewer layers.",
        ),
    ],
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = Dtype.BF16,
    weights: Annotated[
        Weights | None, typer.Option(help="Also measure weights quantized to this type.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale; -1 for a whole row. [int4: 128]")
    ] = None,
    lowp_mode: Annotated[
        Lowp | None,
        typer.Option(help="Precision of GEMMs on quantized weights. [int8 and int4 on CPUs: int8]"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts of a generation.")] = 1,
    beams: Annotated[int, typer.Option(min=1, help="Beams of each text.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="Tokens that a generation adds.")] = 32,
    turns: Annotated[int, typer.Option(min=1, help="Timed generations.")] = 3,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.CPU,
    beside: Annotated[
        list[Beside] | None,
        typer.Option(help="Variant to compare with; repeat it. [eager and inductor]"),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Compare with nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time prompts and decoding, with peak memory and the share of the memory's bandwidth.

    Each variant is a process of its own. Its logits are compared with those of the eager model in
    fp32 first: one that is wrong gets no speed, and the exit code is 1 if it is ours.
    """
    check_model(model)
    sizes: dict[str, Any] = {"batch": batch, "beams": beams, "prompt": prompt, "new": new}
    job = Job(model, OURS, str(dtype), device=str(device), **sizes)
    compared = [] if alone else beside or [Beside.EAGER, Beside.INDUCTOR]
    variants = [Variant(OURS, job)] + [
        Variant(str(name), replace(job, variant=str(name))) for name in compared
    ]
    if weights is not None:
        variants.insert(0, _quantize_weights(job, weights, group_size, lowp_mode))
    elif group_size is not None or lowp_mode is not None:
        came = "--group-size or --lowp-mode alone"
        raise OptionError("--weights beside them", came, "Add --weights int4.")
    rows = list(measure(variants, turns))
    if as_json:
        say_json({"model": model, "dtype": dtype, "device": device, **sizes, "rows": rows})
    else:
        say(make_table(rows), _explain(device))
    if any("failed" in row for row in rows if row["variant"].startswith(OURS)):
        raise typer.Exit(1)


def _quantize_weights(
    job: Job, weights: Weights, group_size: int | None, lowp_mode: Lowp | None
) -> Variant:
    """Return the variant on quantized weights.

    Raises:
        OptionError: for a model that is quantized already.
        QuantizationError: for settings that do not go together.
    """
    from ipex_inductor.cli.llm.models import find_shape, is_quantized

    if not find_shape(job.model) and is_quantized(job.model):
        advice = "Leave --weights out: its own are measured."
        raise OptionError("a plain model with --weights", "a quantized checkpoint", advice)
    integers = weights in (Weights.INT8, Weights.INT4)
    usual_mode = Lowp.INT8 if integers and job.device == "cpu" else Lowp.NONE
    mode = lowp_mode or usual_mode
    size = group_size if group_size is not None else (128 if weights in ("int4", "nf4") else -1)
    job = replace(job, weights=str(weights), group_size=size, lowp_mode=mode.upper())
    job.qconfig()
    return Variant(f"{OURS}, {weights}", job)


def measure(variants: Sequence[Variant], turns: int) -> Iterator[dict[str, Any]]:
    """Yield the results of each variant, one process after the other.

    Args:
        variants: rows of the table.
        turns: timed generations of each.
    """
    references: dict[tuple[str, int, str], str] = {}
    with tempfile.TemporaryDirectory() as folder, _progress() as show:
        for variant in variants:
            key = variant.checked_by
            try:
                if key not in references:
                    show(f"exact logits for {variant.name}")
                    file = str(Path(folder) / f"{len(references)}.npz")
                    job = replace(variant.job, variant="reference", reference=file)
                    with start_child(job.command(), Path(folder) / "log"):
                        references[key] = file
                show(variant.name)
                job = replace(variant.job, reference=references[key])
                yield {"variant": variant.name, **measure_one(job, turns, Path(folder) / "log")}
            except ChildError as error:
                yield {"variant": variant.name, "failed": str(error)}


def measure_one(job: Job, turns: int, log: Path) -> dict[str, Any]:
    """Return the facts of a variant and, if its results are right, its times."""
    with start_child(job.command(), log) as child:
        wrong = describe_error(child.facts)
        if wrong:
            return {**child.facts, "failed": wrong}
        for _ in range(turns):
            child.take_turn()
        return {**child.facts, **summarize(child, job, child.measure_bandwidth())}


@contextmanager
def _progress() -> "Iterator[Any]":
    """Show on stderr which variant is measured: a moving line, or a plain one outside terminals."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: typer.echo(f"measure {text}", err=True)
        return
    with console.status("") as status:
        yield lambda text: status.update(f"measure {text}")


def make_table(rows: Sequence[dict[str, Any]]) -> Listing:
    """Return the table of the rows."""
    heads = ("prompt\ntokens/s", "ms a token\nmedian", "\nleast", "tokens/s", "of the\nbandwidth")
    table = Listing(
        "variant", *map(number, heads), number("peak\nMiB"), number("weights\nMiB"), "logits"
    )
    for row in rows:
        table.add_row(row["variant"], *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    peak, weights = (_in_mib(row.get(key)) for key in ("bytes_peak", "bytes_weights"))
    if "failed" in row:
        first_line = row["failed"].splitlines()[-1]
        return ["-"] * 5 + [peak, weights, first_line]
    share = row.get("of_bandwidth")
    return [
        f"{row['prefill_tokens_s']:.0f}",
        f"{row['median_ms']:.2f}",
        f"{row['least_ms']:.2f}",
        f"{row['tokens_s']:.1f}",
        "-" if share is None else f"{100 * share:.0f} %",
        *(peak, weights),
        f"off by {row['logits_error']:.2g}, {row['logits_limit']:.2g} allowed",
    ]


def _in_mib(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:.0f}"


def _explain(device: Device) -> str:
    return (
        f"of the bandwidth: {READ.format(kind=KINDS[device])}\n"
        f"peak: {PEAKS[device]}; logits: beside the eager model in fp32"
    )

"""`ipex-inductor llm`: the verbs about language models."""

import typer

from ipex_inductor.cli.verbs import Verbs, table

# Each verb is the function `llm_<verb>` in its own module of this folder.
VERBS = {
    "bench": "Time prompts and decoding beside eager and Inductor; results are checked first.",
    "quantize": "Quantize weights to INT8, INT4, NF4 or FP8 and write a checkpoint.",
}


class _Verbs(Verbs):
    path = ("llm",)


llm = typer.Typer(name="llm", cls=_Verbs, no_args_is_help=True, add_completion=False)
table(llm, VERBS)


@llm.callback()
def _llm() -> None:
    """Language models of transformers: how fast they decode, and quantized checkpoints of them."""

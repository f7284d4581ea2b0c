"""`ipex-inductor cache sign`: sign a bundle."""

from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.aot_cache.bundling.packing import sign
from ipex_inductor.cli.cache.shared import bundle_facts, bundle_line
from ipex_inductor.cli.shared import AsJson, say, say_json


def cache_sign(
    bundle: Annotated[Path, typer.Argument(help="A bundle.")],
    key: Annotated[Path, typer.Option(help="The private key; `cache trust new` makes one.")],
    as_json: AsJson = False,
) -> None:
    """Sign a bundle and replace its previous signature; its entries are verified first.

    A bundle without a trusted signature must lie where only you can write it.
    """
    signed = sign(bundle, key)
    if as_json:
        say_json(bundle_facts(bundle, signed))
    else:
        say(f"signed: {bundle_line(bundle, signed)}")

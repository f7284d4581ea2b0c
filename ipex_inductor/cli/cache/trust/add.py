"""`ipex-inductor cache trust add`: trust a key."""

from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.aot_cache import trust
from ipex_inductor.aot_cache.signing import public_key
from ipex_inductor.cli.shared import say


def cache_trust_add(
    name: Annotated[str, typer.Argument(help="What you call it.")],
    file: Annotated[Path, typer.Argument(help="The public key, in PEM.")],
) -> None:
    """Trust a public key: kernels of bundles that it signed will run here.

    Compare the printed key with the one that its owner publishes.
    """
    public = public_key(file)
    trust.add(name, public)
    say(f"{name} {public.hex()}")

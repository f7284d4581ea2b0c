"""`ipex-inductor cache trust rm`: stop trusting a key."""

from typing import Annotated

import typer

from ipex_inductor.aot_cache import trust
from ipex_inductor.cli.shared import say
from ipex_inductor.errors import ArgumentError


def cache_trust_rm(name: Annotated[str, typer.Argument(help="What you call it.")]) -> None:
    """Stop trusting a key: its bundles are refused from the next process on.

    The serial number of its newest accepted bundle is remembered.
    """
    if not trust.remove(name):
        names = ", ".join(trust.trusted_keys()) or "none"
        raise ArgumentError("the name of a trusted key", repr(name), f"There are: {names}.")
    say(f"{name} is not trusted any more")

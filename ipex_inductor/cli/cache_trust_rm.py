"""`ipex-inductor cache trust rm`: trust a key no longer."""

from typing import Annotated

import typer

from ipex_inductor.aot_cache import trust
from ipex_inductor.cli.autotune_shared import say
from ipex_inductor.errors import ArgumentError


def cache_trust_rm(name: Annotated[str, typer.Argument(help="What you call it.")]) -> None:
    """Trust a key no longer: its bundles are refused from the next process on.

    How new a bundle of it was accepted is not forgotten.
    """
    if not trust.remove(name):
        known = ", ".join(trust.trusted()) or "none"
        raise ArgumentError("the name of a trusted key", repr(name), f"There are: {known}.")
    say(f"{name} is not trusted any more")

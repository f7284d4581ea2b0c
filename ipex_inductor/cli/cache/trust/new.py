"""`ipex-inductor cache trust new`: make a pair of keys."""

from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.aot_cache import trust
from ipex_inductor.aot_cache.signing import new_pair
from ipex_inductor.cli.shared import say
from ipex_inductor.errors import ArgumentError


def cache_trust_new(
    name: Annotated[str, typer.Argument(help="What you call it.")],
    into: Annotated[Path, typer.Option(help="The folder for both files.")] = Path(),
) -> None:
    """Make NAME.key, the private key to sign with, and NAME.pub, the public one; trust it here.

    The files are PEM, as OpenSSL makes and reads them.
    """
    trust.check_free(name)
    private, public = into / f"{name}.key", into / f"{name}.pub"
    try:
        raw = new_pair(private, public)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise ArgumentError("a folder that can be written", reason, "Check --into.") from None
    trust.add(name, raw)
    say(f"private key: {private}", f"public key:  {public}", f"{name} {raw.hex()}")

"""`ipex-inductor cache trust`: the verbs over the keys whose bundles are used."""

import typer

from ipex_inductor.cli.verbs import Verbs, table

# Each verb is the function `cache_trust_<verb>` in its own module of this folder.
VERBS = {
    "add": "Trust a public key: bundles that it signed are used.",
    "ls": "List the keys that are trusted here, by name.",
    "new": "Make a pair of keys: a private one to sign with, a public one to hand out.",
    "rm": "Stop trusting a key.",
}


class _Verbs(Verbs):
    path = ("cache", "trust")


cache_trust = typer.Typer(name="trust", cls=_Verbs, no_args_is_help=True, add_completion=False)
table(cache_trust, VERBS)


@cache_trust.callback()
def _trust() -> None:
    """Ed25519 public keys, by name, whose bundles are used."""

"""`ipex-inductor cache`: the verbs over the kernel cache."""

import typer

from ipex_inductor.cli.verbs import Verbs, table

# Each verb is the function `cache_<verb>` in its own module of this folder.
VERBS = {
    "gc": "Remove leftovers of killed processes, and least recently used entries beyond the quota.",
    "ls": "List every entry: its kind, its device, its size, and when it was last used.",
    "merge": "Put the entries of folders and bundles into your cache, each verified.",
    "pack": "Pack entries into one file, a bundle, to ship them; signed with your key.",
    "path": "Print the folder of the kernel cache, and whether it may be used.",
    "sign": "Sign a bundle with your key.",
    "stats": "Count entries and bytes by kind, and compare them with the quota.",
    "trust": "Manage the public keys, by name, whose bundles are used.",
    "unpack": "Put the entries of a bundle into your cache, all of it verified first.",
    "why": "Show why each graph was compiled: how it differs from the nearest cached one.",
    "verify": "Read every entry whole, or compile it again; the exit code says what is wrong.",
}


class _Verbs(Verbs):
    path = ("cache",)


cache = typer.Typer(name="cache", cls=_Verbs, no_args_is_help=True, add_completion=False)
table(cache, VERBS)


@cache.callback()
def _cache() -> None:
    """The kernel cache: compiled kernels under keys that name all that their code depends on."""

"""`ipex-inductor cache`: the verbs over the kernel cache."""

import typer

from ipex_inductor.cli.verbs import Verbs, table

# Each verb is the function `cache_<verb>` in the module of that name.
VERBS = {
    "gc": "Remove what killed processes left, and what was not used for longest beyond the quota.",
    "ls": "Every entry: what it is, for which device, how large, and when it was last used.",
    "merge": "Entries of other folders and of bundles into yours, each verified.",
    "pack": "Entries into one file, a bundle, to ship them; signed with your key.",
    "path": "Where kernels are kept, and whether that folder may be used.",
    "sign": "Sign a bundle with your key.",
    "stats": "How many entries, how many bytes, of which kinds, and how much room is left.",
    "trust": "Whose bundles are used: public keys by name.",
    "unpack": "The entries of a bundle into your cache, all of it verified first.",
    "why": "Why each graph was compiled: what set it apart from the nearest that was there.",
    "verify": "Read every entry whole, or compile it again; the exit code says what is wrong.",
}


class _Verbs(Verbs):
    prefix = "cache_"


cache = typer.Typer(name="cache", cls=_Verbs, no_args_is_help=True, add_completion=False)
table(cache, VERBS)


@cache.callback()
def _cache() -> None:
    """The kernel cache: compiled kernels under keys that name all that their code depends on."""

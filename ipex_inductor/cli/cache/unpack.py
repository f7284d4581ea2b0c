"""`ipex-inductor cache unpack`: put the entries of a bundle into the kernel cache."""

from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.cli.cache.shared import AllowOlder, AllowUnsigned, InFolder, merge_into
from ipex_inductor.cli.shared import AsJson


def cache_unpack(
    bundle: Annotated[Path, typer.Argument(help="A bundle.")],
    allow_unsigned: AllowUnsigned = False,
    allow_older: AllowOlder = False,
    folder: InFolder = None,
    as_json: AsJson = False,
) -> None:
    """Put the entries of a bundle into the kernel cache, all of it verified first.

    To use a bundle where it lies, call `ipex_inductor.use_bundle`, or set IPEX_AOT_BUNDLES.
    Ends with 1 if the cache could not keep every entry.
    """
    merge_into(folder, [open_bundle(bundle, allow_unsigned, allow_older)], as_json)

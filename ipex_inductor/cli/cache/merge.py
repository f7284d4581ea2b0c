"""`ipex-inductor cache merge`: entries of folders and bundles into the kernel cache."""

from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.aot_cache.bundle import Bundle, open_bundle
from ipex_inductor.aot_cache.folder import Folder
from ipex_inductor.cli.cache.shared import AllowOlder, AllowUnsigned, InFolder, merge_into
from ipex_inductor.cli.shared import AsJson


def cache_merge(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE", help="Folders of entries, and bundles.")
    ],
    allow_unsigned: AllowUnsigned = False,
    allow_older: AllowOlder = False,
    folder: InFolder = None,
    as_json: AsJson = False,
) -> None:
    """Put the entries of folders and bundles into the kernel cache, each verified.

    Entries that the cache has already stay. Folders must be writable by you or root only. Bad
    entries are reported on stderr. Ends with 1 if an entry is missing from the cache afterwards.
    """

    def source(path: Path) -> Folder | Bundle:
        if path.is_dir():
            return Folder(path, str(path), writable=False)
        return open_bundle(path, allow_unsigned, allow_older)

    merge_into(folder, [source(path) for path in sources], as_json)

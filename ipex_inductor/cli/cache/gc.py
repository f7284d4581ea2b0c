"""`ipex-inductor cache gc`: free space now."""

from dataclasses import asdict
from typing import Annotated

import typer

from ipex_inductor.aot_cache import use
from ipex_inductor.aot_cache.quota import Swept, quota_of, sweep
from ipex_inductor.cli.cache.shared import InFolder, open_folder, readable, size
from ipex_inductor.cli.shared import AsJson, say, say_json


def cache_gc(
    folder: InFolder = None,
    quota: Annotated[
        str | None,
        typer.Option(
            help="How much may stay: 512M, 8GiB; 0 removes every entry.",
            show_default="IPEX_AOT_QUOTA, or 8GiB",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove what killed processes left, then the least recently used entries beyond the quota.

    Writers do this on their own as well. An entry that is being read stays readable to its end.
    """
    limit = use.quota() if quota is None else quota_of(quota)
    try:
        with readable():
            swept = sweep(open_folder(folder), limit)
    except FileNotFoundError:
        swept = Swept(0, 0, 0, 0)
    if as_json:
        say_json(asdict(swept))
    else:
        gone = f"removed {swept.evicted} entries ({size(swept.freed)})"
        say(f"{gone} and {swept.reaped} dead files; {size(swept.held)} stay")

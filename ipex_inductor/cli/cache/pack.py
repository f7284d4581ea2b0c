"""`ipex-inductor cache pack`: write entries into one file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ipex_inductor.aot_cache.bundling.packing import pack
from ipex_inductor.cli.cache.shared import (
    InFolder,
    bundle_facts,
    bundle_line,
    open_folder,
    readable,
)
from ipex_inductor.cli.shared import AsJson, say, say_json, say_reasons

_KEY = "The private key to sign with; `cache trust new` makes one."


def cache_pack(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Only for this architecture: sm_90, sm_90:NVIDIA-H200. Repeat for more."),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Only of this kind: cubin, cpp. Repeat for more.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help=_KEY)] = None,
    name: Annotated[
        str, typer.Option(help="The bundle's, by which older ones are known.", show_default="OUT's")
    ] = "",
    serial: Annotated[
        int | None, typer.Option(help="What is newer has a larger one.", show_default="the time")
    ] = None,
    folder: InFolder = None,
    as_json: AsJson = False,
) -> None:
    """Write one file with the entries of the kernel cache, signed if a key is given.

    Each entry is verified first; bad ones are left out and reported on stderr.
    """

    def is_selected(key_fields: Mapping[str, Any]) -> bool:
        return _is_for(key_fields.get("architecture"), arch) and (
            not kind or key_fields.get("kind") in kind
        )

    with readable():
        done = pack(open_folder(folder), out, name or out.stem, is_selected, key, serial)
    say_reasons("entries", [f"{entry}: {why}" for entry, why in done.refused.items()])
    if as_json:
        say_json(bundle_facts(out, done.manifest) | {"refused": dict(done.refused)})
    else:
        say(bundle_line(out, done.manifest) + ("" if key else "; it is not signed"))


def _is_for(architecture: object, selected: list[str] | None) -> bool:
    """Return whether `architecture` is selected; `sm_90` stands for all its devices."""
    return not selected or any(f"{architecture}:".startswith(f"{name}:") for name in selected)

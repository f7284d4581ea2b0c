"""Shared options and output of the `cache` verbs."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ipex_inductor.aot_cache.bundle import Bundle
from ipex_inductor.aot_cache.bundling.merging import merge
from ipex_inductor.aot_cache.folder import Folder, RefusedError
from ipex_inductor.aot_cache.manifest import Manifest
from ipex_inductor.aot_cache.store import Store, default_folder
from ipex_inductor.autotune.comparison.words import replace_unprintable
from ipex_inductor.cli.shared import say, say_json, say_reasons
from ipex_inductor.errors import ArgumentError

InFolder = Annotated[
    Path | None, typer.Option("--folder", help="A folder of entries instead of your own.")
]

AllowUnsigned = Annotated[
    bool,
    typer.Option("--allow-unsigned", help="Also if no key signed it that is trusted here."),
]
AllowOlder = Annotated[
    bool, typer.Option("--allow-older", help="Also if a newer one was accepted before.")
]


def open_folder(path: Path | None) -> Folder:
    """Return the folder of entries to look at: `path`, or the default folder."""
    return Folder(path or default_folder(), "ours")


@contextmanager
def readable() -> Iterator[None]:
    """Raise `ArgumentError` for a folder that cannot be read, or that other users can write."""
    try:
        yield
    except FileNotFoundError:
        raise
    except RefusedError as error:
        advice = "Mend that, or look at another one with --folder."
        raise ArgumentError("a folder that only you can write", str(error), advice) from None
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise ArgumentError("a folder that can be read", reason, "Check the path.") from None


def size(count: float) -> str:
    """Return a size in bytes as text, such as `12.5 KiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(4, int(math.log2(count) // 10))
    return f"{count / (1 << 10 * power):.1f} {'KMGT'[power - 1]}iB"


def date(seconds: float) -> str:
    """Return a time as text in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def merge_into(folder: Path | None, sources: Iterable[Folder | Bundle], as_json: bool) -> None:
    """Put entries into the kernel cache and report it; exit with 1 if one is missing afterwards."""
    store = Store(folder, bundles=())
    with readable():
        done = merge(store, sources)
    say_reasons("entries", done.refused)
    at = str(store.folder.path)
    if as_json:
        counts = {"found": done.found, "held": done.held, "refused": list(done.refused)}
        say_json({"path": at} | counts)
    else:
        say(f"{done.held} of {done.found} entries are in {at}")
    if done.held < done.found:
        raise typer.Exit(1)


def bundle_line(path: Path, manifest: Manifest) -> str:
    """Return one line that describes a bundle."""
    held = f"{len(manifest.entries)} entries ({size(manifest.size)})"
    return f"{path}: {replace_unprintable(manifest.name)} {manifest.serial}, {held}"


def bundle_facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the description of a bundle as plain data."""
    about = {"path": str(path), "name": manifest.name, "serial": manifest.serial}
    return about | {"entries": len(manifest.entries), "bytes": manifest.size}

"""What the verbs over the kernel cache share: their options, and how they speak of sizes."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ipex_inductor.aot_cache.folder import Folder, RefusedError
from ipex_inductor.aot_cache.store import default_folder
from ipex_inductor.errors import ArgumentError

InFolder = Annotated[
    Path | None, typer.Option("--folder", help="A folder of entries instead of your own.")
]


def opened(path: Path | None) -> Folder:
    """The folder of entries to look at."""
    return Folder(path or default_folder(), "ours")


@contextmanager
def readable() -> Iterator[None]:
    """Raises `ArgumentError` for a folder that others can write, or that cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise
    except RefusedError as error:
        todo = "Mend that, or look at another one with --folder."
        raise ArgumentError("a folder that only you can write", str(error), todo) from None
    except OSError as error:
        came = f"{error.filename}: {error.strerror}"
        raise ArgumentError("a folder that can be read", came, "Check the path.") from None


def size(count: float) -> str:
    """`12.5 KiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(4, int(math.log2(count) // 10))
    return f"{count / (1 << 10 * power):.1f} {'KMGT'[power - 1]}iB"


def quota_of(text: str) -> int:
    """The bytes that `512M`, `8GiB` or `1000` say; raises `ArgumentError`."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ArgumentError("a size such as 512M or 8GiB", repr(text), "Write it so.")
    return int(float(found[1]) * (1 << 10 * " KMGT".index(found[2].upper() or " ")))


def date(seconds: float) -> str:
    """In UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")

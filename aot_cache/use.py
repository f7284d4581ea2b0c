"""The bundles that this process uses: of `use_bundle`, and of the environment."""

import functools
import os
from pathlib import Path

from ipex_inductor.aot_cache.bundle import Bundle, open_bundle
from ipex_inductor.aot_cache.manifest import Manifest
from ipex_inductor.aot_cache.notices import say
from ipex_inductor.errors import IpexError

_used: list[Bundle] = []


def use_bundle(
    path: str | os.PathLike[str], allow_unsigned: bool = False, allow_older: bool = False
) -> Manifest:
    """Serve kernels from a bundle, in this process, where the kernel cache has none; what is in it.

    All of it is verified first. `allow_unsigned`: also if nobody signed it, or by a key that is not
    trusted here, where only you can write it. `allow_older`: also if a newer one of that name and
    key was used before. Raises `BundleError`, of which `UntrustedError` and `OlderBundleError` are
    kinds. `IPEX_AOT_BUNDLES=one:two` does the same, and skips with a warning what it may not use.
    """
    bundle = open_bundle(Path(path), allow_unsigned, allow_older)
    if all(used.manifest != bundle.manifest for used in in_use()):
        _used.append(bundle)
    return bundle.manifest


def in_use() -> tuple[Bundle, ...]:
    """Those of the environment, which is read once a process, and then those of `use_bundle`."""
    return (*_from_environment(), *_used)


@functools.cache
def _from_environment() -> tuple[Bundle, ...]:
    found = []
    for path in filter(None, os.environ.get("IPEX_AOT_BUNDLES", "").split(os.pathsep)):
        try:
            found.append(open_bundle(Path(path)))
        except IpexError as error:
            say(f"a bundle of IPEX_AOT_BUNDLES is not used: {error}")
    return tuple(found)

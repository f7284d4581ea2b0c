"""Kernel cache settings from the environment, and the bundles that this process uses."""

import functools
import os
from pathlib import Path

from ipex_inductor.aot_cache.bundle import Bundle, open_bundle
from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.aot_cache.manifest import Manifest
from ipex_inductor.aot_cache.quota import QUOTA, quota_of
from ipex_inductor.aot_cache.remote import Remote
from ipex_inductor.errors import IpexError

_used: list[Bundle] = []


def use_bundle(
    path: str | os.PathLike[str], allow_unsigned: bool = False, allow_older: bool = False
) -> Manifest:
    """Serve kernels from a bundle, in this process, where the kernel cache has none.

    All of it is verified first. `IPEX_AOT_BUNDLES=one:two` does this for every process, and skips
    bundles that may not be used, with a warning.

    Args:
        path: File of the bundle.
        allow_unsigned: Also use a bundle without a signature, or signed by a key that is not
            trusted here, if only you can write it.
        allow_older: Also use a bundle although a newer one of that name and key was used before.

    Returns:
        The bundle's manifest.

    Raises:
        BundleError: The bundle cannot be used; `UntrustedError` and `OlderBundleError` are kinds.
    """
    bundle = open_bundle(Path(path), allow_unsigned, allow_older)
    if all(used.manifest != bundle.manifest for used in in_use()):
        _used.append(bundle)
    return bundle.manifest


def in_use() -> tuple[Bundle, ...]:
    """Return the environment's bundles, read once per process, then those of `use_bundle`."""
    return (*_from_environment(), *_used)


def layers() -> tuple[Path, ...]:
    """Return the read-only folders of `IPEX_AOT_LAYERS=one:two`."""
    named = os.environ.get("IPEX_AOT_LAYERS", "").split(os.pathsep)
    return tuple(Path(path).expanduser() for path in named if path)


def remotes() -> tuple[Remote, ...]:
    """Return the remotes of `IPEX_AOT_REMOTES`: URLs separated by spaces, for fsspec.

    `IPEX_AOT_WRITE_BACK=1` also uploads entries that are compiled here. Writers of a remote decide
    what runs here: a digest is no signature.
    """
    back = _switch("IPEX_AOT_WRITE_BACK", os.environ.get("IPEX_AOT_WRITE_BACK", ""))
    urls = os.environ.get("IPEX_AOT_REMOTES", "").split()
    return tuple(Remote(url, write_back=back) for url in urls)


def recompiles() -> bool:
    """Return whether graphs with an entry are recompiled and compared: `IPEX_AOT_VERIFY=1`."""
    return _switch("IPEX_AOT_VERIFY", os.environ.get("IPEX_AOT_VERIFY", ""))


def quota() -> int:
    """Return the bytes of `IPEX_AOT_QUOTA` (`512M`, `8GiB`); warn if it cannot be read."""
    text = os.environ.get("IPEX_AOT_QUOTA", "")
    try:
        return quota_of(text) if text else QUOTA
    except IpexError as error:
        say(f"IPEX_AOT_QUOTA is not used: {error}")
        return QUOTA


def _switch(name: str, text: str) -> bool:
    """Return the flag that an environment variable states; warn if it is neither 0 nor 1."""
    value = text.strip().lower()
    if value not in ("", "0", "1", "false", "true"):
        say(f"{name} is not used: expected 0 or 1; got {value!r}")
    return value in ("1", "true")


@functools.cache
def _from_environment() -> tuple[Bundle, ...]:
    """Open the bundles of `IPEX_AOT_BUNDLES`; warn about each that may not be used."""
    bundles = []
    for path in filter(None, os.environ.get("IPEX_AOT_BUNDLES", "").split(os.pathsep)):
        try:
            bundles.append(open_bundle(Path(path)))
        except IpexError as error:
            say(f"a bundle of IPEX_AOT_BUNDLES is not used: {error}")
    return tuple(bundles)

"""What the environment says of the kernel cache, and the bundles that this process uses."""

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


def layers() -> tuple[Path, ...]:
    """The folders of `IPEX_AOT_LAYERS=one:two`, which are only read."""
    named = os.environ.get("IPEX_AOT_LAYERS", "").split(os.pathsep)
    return tuple(Path(path).expanduser() for path in named if path)


def remotes() -> tuple[Remote, ...]:
    """The URLs of `IPEX_AOT_REMOTES`, with spaces between them, any that fsspec knows.

    `IPEX_AOT_WRITE_BACK=1` also puts there what is compiled here. Who can write there decides what
    runs here: a digest is no signature.
    """
    back = _switch("IPEX_AOT_WRITE_BACK", os.environ.get("IPEX_AOT_WRITE_BACK", ""))
    urls = os.environ.get("IPEX_AOT_REMOTES", "").split()
    return tuple(Remote(url, write_back=back) for url in urls)


def recompiles() -> bool:
    """Whether graphs that have an entry are compiled and compared: `IPEX_AOT_VERIFY=1`."""
    return _switch("IPEX_AOT_VERIFY", os.environ.get("IPEX_AOT_VERIFY", ""))


def quota() -> int:
    """The bytes of `IPEX_AOT_QUOTA` (`512M`, `8GiB`); what cannot be read is a warning."""
    text = os.environ.get("IPEX_AOT_QUOTA", "")
    try:
        return quota_of(text) if text else QUOTA
    except IpexError as error:
        say(f"IPEX_AOT_QUOTA is not used: {error}")
        return QUOTA


def _switch(name: str, text: str) -> bool:
    said = text.strip().lower()
    if said not in ("", "0", "1", "false", "true"):
        say(f"{name} is not used: expected 0 or 1; got {said!r}")
    return said in ("1", "true")


@functools.cache
def _from_environment() -> tuple[Bundle, ...]:
    found = []
    for path in filter(None, os.environ.get("IPEX_AOT_BUNDLES", "").split(os.pathsep)):
        try:
            found.append(open_bundle(Path(path)))
        except IpexError as error:
            say(f"a bundle of IPEX_AOT_BUNDLES is not used: {error}")
    return tuple(found)

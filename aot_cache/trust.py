"""Trusted signers: public keys by name, and the newest serial accepted of each bundle.

All of it is in `home()/trust`, whose owner and mode are checked like those of any private folder:
writers of that folder decide whose code runs.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ipex_inductor.aot_cache.cache_root import home
from ipex_inductor.aot_cache.folder import Folder, RefusedError
from ipex_inductor.aot_cache.log_once import say
from ipex_inductor.aot_cache.manifest import NAME
from ipex_inductor.aot_cache.signing import from_pem, to_pem
from ipex_inductor.errors import ArgumentError, KeyFileError, UntrustedError

_KEY, _ACCEPTED = ".pub", ".accepted"


def trust_folder() -> Path:
    """Return the folder of the keys."""
    return home() / "trust"


def check_name(name: str) -> None:
    """Raise `ArgumentError` for a text that cannot be the name of a key or a bundle."""
    if not re.fullmatch(NAME, name):
        expected = "a name of up to 64 letters, digits, dots, dashes and underscores"
        raise ArgumentError(expected, repr(name), "Choose another one.")


def check_free(name: str, public: bytes = b"") -> None:
    """Raise `ArgumentError` for an invalid name, or one of a key other than `public`."""
    check_name(name)
    if trusted_keys().get(name, public) != public:
        advice = f"Choose another one, or first run: ipex-inductor cache trust rm {name}"
        raise ArgumentError("a name for a key", f"{name!r}, which is another key's", advice)


def trusted_keys() -> dict[str, bytes]:
    """Return the public keys by name; raise `UntrustedError` if others can write the folder."""
    folder = _folder()
    names = sorted(name for name in _names(folder, _KEY))
    read = ((name, _read(folder, name + _KEY)) for name in names)
    return {name: key for name, key in read if key}


def add(name: str, public: bytes) -> None:
    """Trust a key; raise `ArgumentError` for an invalid or used name, `UntrustedError`."""
    check_free(name, public)
    try:
        _folder().publish(name + _KEY, to_pem(public))
    except (OSError, RefusedError) as error:
        raise _trust_error(error) from None


def remove(name: str) -> bool:
    """Stop trusting a key and return whether it was trusted; accepted serials are kept."""
    return name in trusted_keys() and _folder().remove(name + _KEY)


def newest(public: bytes, bundle: str) -> int:
    """Return the largest accepted serial of bundles of that name and key, -1 without any."""
    prefix = _prefix(public, bundle)
    serials = (name.removeprefix(prefix) for name in _names(_folder(), _ACCEPTED, prefix))
    return max((int(serial) for serial in serials if serial.isdecimal()), default=-1)


def accept(public: bytes, bundle: str, serial: int) -> None:
    """Record that a bundle was accepted, so that older ones are refused from now on.

    Each serial has a file of its own, so that of two concurrent processes the newer serial counts.
    If the folder cannot be written this is logged, and an older bundle would be accepted later.
    """
    if serial <= newest(public, bundle):
        return
    prefix, folder = _prefix(public, bundle), _folder()
    try:
        folder.publish(f"{prefix}{serial:020d}{_ACCEPTED}", bundle.encode())
    except (OSError, RefusedError) as error:
        say(f"an older bundle {bundle!r} would be used later: {error}")
        return
    for name in list(_names(folder, _ACCEPTED, prefix)):
        if int(name.removeprefix(prefix)) < serial:
            folder.remove(name + _ACCEPTED)


def _folder() -> Folder:
    """Return the folder of trust as a folder of files."""
    return Folder(trust_folder(), "trust")


def _names(folder: Folder, suffix: str, prefix: str = "") -> Iterator[str]:
    """Yield the file names with that suffix and prefix, without the suffix; none if missing.

    Raises `UntrustedError` if the folder cannot be read or others can write it.
    """
    try:
        for file in folder.files(suffix):
            if file.name.startswith(prefix):
                yield file.name.removesuffix(suffix)
    except FileNotFoundError:
        return
    except (OSError, RefusedError) as error:
        raise _trust_error(error) from None


def _read(folder: Folder, name: str) -> bytes:
    """Return a trusted key; b"", logged, for a file that is not private or not a key."""
    with suppress(FileNotFoundError):
        try:
            return from_pem(folder.load(name), folder.path / name)
        except (OSError, RefusedError, KeyFileError) as error:
            say(f"a key is not trusted: {error}")
    return b""


def _prefix(public: bytes, bundle: str) -> str:
    """Return the prefix of the files that record accepted serials of a bundle and key."""
    return hashlib.sha256(public + bundle.encode()).hexdigest() + "-"


def _trust_error(error: Exception) -> UntrustedError:
    """Return the `UntrustedError` for an error of the folder."""
    expected = "a folder of trusted keys that only you can write"
    return UntrustedError(
        expected, str(error), "Fix its owner and mode: its keys decide whose code runs."
    )

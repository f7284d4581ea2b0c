"""Whose bundles are used: public keys by name, and how new a bundle each has had accepted.

All of it lies in `home()/trust`, whose owner and mode are judged as those of any folder of ours:
who can write there decides whose code runs.
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
    """Where the keys lie."""
    return home() / "trust"


def check_name(name: str) -> None:
    """Raises `ArgumentError` for what cannot be the name of a key or a bundle."""
    if not re.fullmatch(NAME, name):
        expected = "a name of up to 64 letters, digits, dots, dashes and underscores"
        raise ArgumentError(expected, repr(name), "Choose another one.")


def check_free(name: str, public: bytes = b"") -> None:
    """Raises `ArgumentError` for a name that is another key's than `public`, or that is none."""
    check_name(name)
    if trusted().get(name, public) != public:
        todo = f"Choose another one, or first run: ipex-inductor cache trust rm {name}"
        raise ArgumentError("a name for a key", f"{name!r}, which is another key's", todo)


def trusted() -> dict[str, bytes]:
    """The public keys by name; raises `UntrustedError` for a folder that others can write."""
    folder = _folder()
    names = sorted(name for name in _names(folder, _KEY))
    read = ((name, _read(folder, name + _KEY)) for name in names)
    return {name: key for name, key in read if key}


def add(name: str, public: bytes) -> None:
    """Trust a key; raises `ArgumentError` for a name that is taken or none, `UntrustedError`."""
    check_free(name, public)
    try:
        _folder().publish(name + _KEY, to_pem(public))
    except (OSError, RefusedError) as error:
        raise _refused(error) from None


def remove(name: str) -> bool:
    """Trust a key no longer; whether it was. What was accepted from it is not forgotten."""
    return name in trusted() and _folder().remove(name + _KEY)


def newest(public: bytes, bundle: str) -> int:
    """The serial of the newest bundle of that name and key that was accepted, -1 if none was."""
    prefix = _prefix(public, bundle)
    found = (name.removeprefix(prefix) for name in _names(_folder(), _ACCEPTED, prefix))
    return max((int(serial) for serial in found if serial.isdecimal()), default=-1)


def accept(public: bytes, bundle: str, serial: int) -> None:
    """Remember that one was accepted: what is older no longer is.

    A name for each serial, so that of two processes at once the newer one counts. Where nothing can
    be written this is said, and an older bundle would pass.
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
    return Folder(trust_folder(), "trust")


def _names(folder: Folder, suffix: str, prefix: str = "") -> Iterator[str]:
    """What stands before the suffix in the names of files; none where there is no folder."""
    try:
        for file in folder.files(suffix):
            if file.name.startswith(prefix):
                yield file.name.removesuffix(suffix)
    except FileNotFoundError:
        return
    except (OSError, RefusedError) as error:
        raise _refused(error) from None


def _read(folder: Folder, name: str) -> bytes:
    """A trusted key; nothing, which is said, for a file that is none or not ours alone."""
    with suppress(FileNotFoundError):
        try:
            return from_pem(folder.load(name), folder.path / name)
        except (OSError, RefusedError, KeyFileError) as error:
            say(f"a key is not trusted: {error}")
    return b""


def _prefix(public: bytes, bundle: str) -> str:
    return hashlib.sha256(public + bundle.encode()).hexdigest() + "-"


def _refused(error: Exception) -> UntrustedError:
    expected = "a folder of trusted keys that only you can write"
    return UntrustedError(expected, str(error), "Mend that: it decides whose code runs.")

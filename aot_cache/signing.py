"""Ed25519: key pairs in PEM files as OpenSSL writes them, signatures, and their verification.

All of it uses the library `cryptography`, which is imported when first needed.
"""

import os
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipex_inductor.aot_cache import disk
from ipex_inductor.errors import KeyFileError, MissingPackageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PUBLIC, SIGNATURE = 32, 64  # bytes
_LIMIT = 1 << 16  # bytes of a key's file
_READABLE = stat.S_IRWXG | stat.S_IRWXO


def new_pair(private: Path, public: Path) -> bytes:
    """Write a new key pair, the private key readable by its owner alone.

    Returns:
        The 32 bytes of the public key.

    Raises:
        KeyFileError: a file exists already.
        OSError: a file cannot be written.
    """
    _require()
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    unencrypted = s.NoEncryption()
    text = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, unencrypted)
    raw = key.public_key().public_bytes_raw()
    for path, data, mode in ((private, text, 0o600), (public, to_pem(raw), 0o644)):
        try:
            file = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            advice = "Name another one: a key that was used must not be lost."
            raise KeyFileError(
                "a file that is not there yet", f"{path}, which is", advice
            ) from None
        with os.fdopen(file, "wb") as opened:
            opened.write(data)
    return raw


def private_key(path: Path) -> "Ed25519PrivateKey":
    """Return the key to sign with; raise `KeyFileError`, also if others can read its file."""
    _require()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path, private=True)
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key("private", path)
    return key


def public_key(path: Path) -> bytes:
    """Return the 32 bytes of the public key in a file; raise `KeyFileError` if it has none."""
    return from_pem(_read(path, private=False), path)


def from_pem(data: bytes, path: Path) -> bytes:
    """Return the 32 bytes of a public key; `path` is for the message of the `KeyFileError`."""
    _require()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise _no_key("public", path)
    return key.public_bytes_raw()


def to_pem(public: bytes) -> bytes:
    """Return the PEM file of a public key of 32 bytes."""
    _require()
    from cryptography.hazmat.primitives import serialization as s

    key = _public(public)
    return bytes(key.public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))


def is_signed(message: bytes, public: bytes, signature: bytes) -> bool:
    """Return whether `signature` of `message` is valid for the public key."""
    _require()
    from cryptography.exceptions import InvalidSignature

    try:
        _public(public).verify(signature, message)
    except (InvalidSignature, ValueError):  # ValueError: 32 bytes that are no key
        return False
    return True


def _public(raw: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(raw)


def _read(path: Path, private: bool) -> bytes:
    """Return a key file's bytes; links are followed, as secrets are often mounted as links."""
    try:
        file = disk.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        actual = f"{path}: {error.strerror}"
        raise KeyFileError("a key's file", actual, "Check the path.") from None
    try:
        status = disk.fstat(file)
        if private and status.st_mode & _READABLE:
            actual = f"{path}, which has mode {stat.S_IMODE(status.st_mode):04o}"
            advice = "If nobody has read it, chmod 600 it; else make a new one."
            raise KeyFileError("a private key that only you can read", actual, advice)
        return disk.read(file, _LIMIT) if stat.S_ISREG(status.st_mode) else b""
    finally:
        disk.close(file)


def _no_key(kind: str, path: Path) -> KeyFileError:
    """Return the error for a file that holds no Ed25519 key."""
    expected = f"an Ed25519 {kind} key in PEM, without a password"
    advice = "Make a pair with `ipex-inductor cache trust new NAME`."
    return KeyFileError(expected, f"{path}, which holds none", advice)


def _require() -> None:
    """Raise `MissingPackageError` if `cryptography` is not installed."""
    if find_spec("cryptography") is None:
        advice = 'Run: pip install "ipex-inductor[sign]"'
        raise MissingPackageError("cryptography, for signatures", "no such package", advice)

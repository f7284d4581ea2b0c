"""Data of packages: read where it is installed, else downloaded once by the package manager.

Downloads lie in the folder of the environment variable `IPEX_TEST_DATA`, by default one for
temporary files. Without a network the data is missing, and so are the results.
"""

import getpass
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

INSTALLED_FASHION = Path("/usr/share/datasets/fashion-mnist")
TEXTS = "hutto_ICWSM_2014"
DOWNLOAD_SECONDS = 120


class MissingDataError(Exception):
    """Data or weights are neither installed nor can they be downloaded."""


def require_modules(*names: str) -> None:
    """Raise unless all modules can be imported.

    Raises:
        MissingDataError: if one cannot.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise MissingDataError(
            f"{', '.join(missing)} not installed: pip install 'ipex-inductor[accuracy]'"
        )


def data_folder() -> Path:
    """Return the folder of downloads."""
    default = Path(tempfile.gettempdir()) / f"ipex_test_data_{getpass.getuser()}"
    folder = Path(os.environ.get("IPEX_TEST_DATA", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fashion_folder() -> Path:
    """Return the folder of Fashion-MNIST's four files.

    Raises:
        MissingDataError: if the Debian package is neither installed nor can be downloaded.
    """
    downloaded = data_folder() / "fashion"
    place = downloaded / INSTALLED_FASHION.relative_to("/")
    for folder in (INSTALLED_FASHION, place):
        if (folder / "t10k-images-idx3-ubyte.gz").exists():
            return folder
    package = "dataset-fashion-mnist"
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise MissingDataError(f"the Debian package {package} is not installed")
    with tempfile.TemporaryDirectory(dir=data_folder()) as scratch:
        _run(["apt-get", "download", package], scratch, package)
        (archive,) = Path(scratch).glob("*.deb")
        unpacked = Path(scratch) / "unpacked"
        _run(["dpkg", "-x", str(archive), str(unpacked)], scratch, package)
        _publish(unpacked, downloaded)
    return place


def texts_folder() -> Path:
    """Return the folder of the texts in the source package of vaderSentiment.

    Raises:
        MissingDataError: if it cannot be downloaded.
    """
    downloaded = data_folder() / "texts"
    if not downloaded.exists():
        package = "vaderSentiment==3.3.2"
        with tempfile.TemporaryDirectory(dir=data_folder()) as scratch:
            options = ["--no-deps", "--no-binary", ":all:", package]
            _run([sys.executable, "-m", "pip", "download", *options], scratch, package)
            (archive,) = Path(scratch).glob("*.tar.gz")
            _unpack(archive, Path(scratch))
            (inner,) = Path(scratch).glob(f"*/*/{TEXTS}.tar.gz")
            _unpack(inner, Path(scratch) / "unpacked")
            _publish(Path(scratch) / "unpacked", downloaded)
    return downloaded / TEXTS


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


def _publish(unpacked: Path, folder: Path) -> None:
    """Move a whole folder to its place, unless another process was faster."""
    try:
        unpacked.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _run(command: list[str], folder: str, package: str) -> None:
    """Run a command of the package manager in a folder.

    Raises:
        MissingDataError: if it fails.
    """
    try:
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, timeout=DOWNLOAD_SECONDS
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise MissingDataError(f"{package} cannot be downloaded: {error}") from error
